/* An open generation, and the pages of it that were read. Private. */
#ifndef KVFS_INDEX_H
#define KVFS_INDEX_H

#include "hash.h"
#include "kvfs_native.h"

#ifndef KVFS_SLOTS /* tests have fewer, so that one page takes the place of another */
#define KVFS_SLOTS 1024
#endif
/* SLOTS: branches that are kept, an even number; one for each 1,000 rows of keys, so they are all kept of a million. */
enum { PAGE = 4096, SLOTS = KVFS_SLOTS, MEMO = 1024, TABLES = 3 };
enum { PAGES_TABLE, SEGMENTS_TABLE, NAMESPACES_TABLE };

/* A B+ tree: the page of its root and its height; height 0: it is empty. */
typedef struct {
    uint64_t root;
    unsigned height;
} tree;

typedef struct {
    uint64_t txn, call;      /* commit that it was read at, last call that reported it; 0: nothing here */
    uint32_t number, state;  /* state 0: there is no such row */
    uint64_t tail;
    uint8_t id[16];
} memo;

struct kvfs_index {
    uint32_t open, busy, plain; /* plain: see read_now */
    int pid;
    kvfs_descriptors fd;
    int64_t current_ctime_ns;
    uint64_t txn, last_page, calls;
    tree tables[TABLES];
    uint64_t slot_page[SLOTS], leaf_page; /* 0: empty; pages 0 and 1 are never asked for */
    memo memos[MEMO];
    uint8_t leaf[PAGE], slots[SLOTS][PAGE];
};

/* Begins a read of the last commit: finds out where its tables are. 0, or an error of kvfs_walk; then there is nothing to
 * end. */
int64_t index_begin(kvfs_index *index);

/* Ends a read, of which ``rc`` is the result: returns it if all pages that were read belong to the commit that it began
 * with; otherwise KVFS_MOVED or -ESTALE. */
int64_t index_end(kvfs_index *index, int64_t rc);

/* Value of a key: its length, the bytes in out; or -ENOENT, -E2BIG (longer than cap), or an error of kvfs_walk.
 * out NULL: 0 or -ENOENT, the value is not read. */
int64_t tree_get(
    kvfs_index *index, const tree *table, const uint8_t *key, unsigned key_bytes, uint8_t *out, uint64_t cap);

/* First key that is not below ``key``: its length, the bytes in out (at most 511); or -ENOENT, or an error. */
int64_t tree_seek(kvfs_index *index, const tree *table, const uint8_t *key, unsigned key_bytes, uint8_t out[512]);

#endif
