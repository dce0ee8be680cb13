/* A reader of LMDB 0.9 files (data version 1, pages of 4 KiB, little endian) that never waits.
 *
 * Pages are read with RWF_NOWAIT and copied, so there is no map, no page fault and no reader slot. Nor is there a lock,
 * although other processes may commit meanwhile: what commit T reaches stays what it is until T + 2 is complete. LMDB
 * writes only to pages that are free, and transaction T + n takes pages that were freed before T + n - 1 only
 * (mdb_page_alloc, mdb_find_oldest without readers): pages that T + 1 frees are written to by T + 3 at the earliest. So a
 * read that began with T is right if the last commit at its end is T or T + 1, whatever its result; otherwise it is
 * repeated.
 * Nothing in the file is trusted: a page must bear its own number and the kind that its place asks for, each offset
 * and length is checked before it is used, and heights are bounded. */
#define _GNU_SOURCE
#include <sched.h>

#include "index.h"
#include "now.h"

enum { BRANCH = 1, LEAF = 2, OVERFLOW = 4, META = 8 }; /* kinds of pages */
enum { BIG = 1, TABLE = 2 };                    /* flags of nodes */
enum { HEAD = 16, NODE = 8, HEIGHT_MAX = 16, KEY_MAX = 511, RECORD = 48 };
static const uint32_t MAGIC = 0xBEEFC0DE;
static const uint64_t NO_PAGE = ~(uint64_t)0;

/* -- reading pages ------------------------------------------------------------------------------------------- */

static int64_t check_page(const uint8_t *page, uint64_t number, int kind) {
    unsigned lower = load16(page + 12), upper = load16(page + 14);
    int fits = lower >= HEAD && !(lower & 1) && lower <= upper && upper <= PAGE;
    return load64(page) == number && load16(page + 10) == kind && fits && lower > HEAD ? 0 : -EIO;
}

/* Where a branch is kept, or will be: in either of two slots. */
static uint64_t slot_of(const kvfs_index *x, uint64_t number) {
    uint64_t slot = number % SLOTS, kept = x->slot_page[slot], beside = x->slot_page[slot ^ 1];
    return kept != number && (beside == number || (kept && !beside)) ? slot ^ 1 : slot;
}

/* A page of a tree, which has one entry at least. Branches are few, so they are kept; of leaves the last one. */
static int64_t get_page(kvfs_index *x, uint64_t number, int kind, const uint8_t **page) {
    if (number < 2 || number > x->last_page) return -EIO;
    uint64_t slot = kind == LEAF ? 0 : slot_of(x, number);
    uint64_t *kept = kind == LEAF ? &x->leaf_page : &x->slot_page[slot];
    uint8_t *to = kind == LEAF ? x->leaf : x->slots[slot];
    if (*kept != number) {
        *kept = 0;
        int64_t rc = read_now(x->fd.data, to, PAGE, number * PAGE, &x->plain);
        if (rc || (rc = check_page(to, number, kind))) return rc;
        *kept = number;
    }
    *page = to;
    return 0;
}

static inline unsigned entries(const uint8_t *page) { return (load16(page + 12) - HEAD) / 2u; }

/* Entry i of a page, whose head and key are inside of it; NULL if they are not. */
static const uint8_t *entry(const uint8_t *page, unsigned i) {
    unsigned at = load16(page + HEAD + 2 * i);
    if (at < HEAD || at + NODE > PAGE || at + NODE + load16(page + at + 6) > PAGE) return NULL;
    return page + at;
}

static int compare(const uint8_t *node, const uint8_t *key, unsigned n) {
    unsigned have = load16(node + 6);
    if (have >= 8 && n >= 8) { /* hashes differ here: a call of memcmp takes longer */
        uint64_t mine = __builtin_bswap64(load64(key)), other = __builtin_bswap64(load64(node + NODE));
        if (mine != other) return mine < other ? -1 : 1;
    }
    int order = memcmp(key, node + NODE, have < n ? have : n);
    return order ? order : (int)n - (int)have;
}

static uint64_t child(const uint8_t *node) {
    return load16(node) | (uint64_t)load16(node + 2) << 16 | (uint64_t)load16(node + 4) << 32;
}

/* First entry from ``low`` on that is not below the key, or the number of entries; exact: it is the key. */
static int64_t search(const uint8_t *page, unsigned low, const uint8_t *key, unsigned n, int *exact) {
    unsigned high = entries(page);
    *exact = 0;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        const uint8_t *node = entry(page, middle);
        if (!node) return -EIO;
        int order = compare(node, key, n);
        if (!order) {
            *exact = 1;
            return middle;
        }
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* The leaf where a key belongs; right: page and level of the branch or leaf that follows it, page 0: none does. */
static int64_t descend(
    kvfs_index *x, const tree *t, const uint8_t *key, unsigned n, const uint8_t **leaf, uint64_t *right,
    unsigned *right_level) {
    uint64_t number = t->root;
    *right = 0;
    if (!t->height) return -ENOENT;
    for (unsigned level = 1; level < t->height; level++) {
        const uint8_t *page, *node;
        int exact;
        int64_t rc = get_page(x, number, BRANCH, &page);
        if (rc) return rc;
        int64_t i = search(page, 1, key, n, &exact); /* entry 0 has no key: it is below all */
        if (i < 0) return i;
        if (!exact) i--;
        if (i + 1 < entries(page)) {
            if (!(node = entry(page, (unsigned)i + 1))) return -EIO;
            *right = child(node);
            *right_level = level + 1;
        }
        if (!(node = entry(page, (unsigned)i))) return -EIO;
        number = child(node);
    }
    return get_page(x, number, LEAF, leaf);
}

int64_t tree_get(kvfs_index *x, const tree *t, const uint8_t *key, unsigned n, uint8_t *out, uint64_t cap) {
    const uint8_t *page, *node;
    uint64_t right;
    unsigned level;
    int exact;
    int64_t rc = descend(x, t, key, n, &page, &right, &level);
    if (rc) return rc;
    int64_t i = search(page, 0, key, n, &exact);
    if (i < 0) return i;
    if (!exact) return -ENOENT;
    if (!out) return 0;
    if (!(node = entry(page, (unsigned)i))) return -EIO;
    uint64_t size = load16(node) | (uint64_t)load16(node + 2) << 16, at = (uint64_t)(node - page) + NODE + n;
    unsigned flags = load16(node + 4);
    if (flags & ~(unsigned)(BIG | TABLE)) return -EIO; /* duplicates: no table of a store has them */
    if (size > cap) return -E2BIG;
    if (flags & BIG) {
        uint8_t head[HEAD];
        if (at + 8 > PAGE) return -EIO;
        uint64_t first = load64(page + at), pages = (HEAD + size + PAGE - 1) / PAGE;
        if (first < 2 || first > x->last_page || pages > x->last_page - first + 1) return -EIO;
        if ((rc = read_now(x->fd.data, head, HEAD, first * PAGE, &x->plain))) return rc;
        if (load64(head) != first || load16(head + 10) != OVERFLOW || load32(head + 12) < pages) return -EIO;
        if ((rc = read_now(x->fd.data, out, size, first * PAGE + HEAD, &x->plain))) return rc;
    } else {
        if (at + size > PAGE) return -EIO;
        memcpy(out, page + at, size);
    }
    return (int64_t)size;
}

int64_t tree_seek(kvfs_index *x, const tree *t, const uint8_t *key, unsigned n, uint8_t out[512]) {
    const uint8_t *page, *node;
    uint64_t right;
    unsigned level = 0;
    int exact;
    int64_t rc = descend(x, t, key, n, &page, &right, &level);
    if (rc) return rc;
    int64_t i = search(page, 0, key, n, &exact);
    if (i < 0) return i;
    if (i == entries(page)) {
        if (!right) return -ENOENT;
        for (i = 0; level < t->height; level++) { /* the leftmost leaf of what follows */
            if ((rc = get_page(x, right, BRANCH, &page))) return rc;
            if (!(node = entry(page, 0))) return -EIO;
            right = child(node);
        }
        if ((rc = get_page(x, right, LEAF, &page))) return rc;
    }
    if (!(node = entry(page, (unsigned)i)) || load16(node + 6) > KEY_MAX) return -EIO;
    memcpy(out, node + NODE, load16(node + 6));
    return load16(node + 6);
}

/* -- what is current ------------------------------------------------------------------------------------------- */

static int64_t read_record(const uint8_t *record, tree *t) {
    unsigned height = load16(record + 6);
    uint64_t root = load64(record + 40);
    if (load16(record + 4) || height > HEIGHT_MAX || (root == NO_PAGE) != !height) return -EIO; /* flags: none */
    *t = (tree){root, height};
    return 0;
}

enum { META_BYTES = PAGE + HEAD + 136, TXN = HEAD + 128 }; /* both metas, from the start of the file; number of a commit */

/* The later one of two metas. */
static const uint8_t *last_meta(const uint8_t *both) {
    return both + HEAD + (load64(both + TXN) >= load64(both + PAGE + TXN) ? 0 : PAGE);
}

/* Whether what was read of commit ``txn`` is right: 0, KVFS_MOVED, or an error of kvfs_walk. */
static int64_t check_moved(kvfs_index *x, uint64_t txn) {
    uint8_t both[META_BYTES];
    int64_t rc = read_now(x->fd.data, both + TXN, META_BYTES - TXN, TXN, &x->plain);
    if (rc) return rc;
    return load64(last_meta(both) + 128) - txn > 1 ? KVFS_MOVED : 0;
}

static int64_t read_tables(kvfs_index *x, const uint8_t *meta) {
    static const char *const names[TABLES] = {"pages", "segments", "namespaces"};
    uint8_t record[RECORD];
    tree main;
    int64_t rc = read_record(meta + 72, &main);
    if (rc) return rc;
    for (int i = 0; i < TABLES; i++) {
        rc = tree_get(x, &main, (const uint8_t *)names[i], (unsigned)strlen(names[i]), record, RECORD);
        if (rc != RECORD) return rc < 0 && rc != -ENOENT && rc != -E2BIG ? rc : -EIO;
        if ((rc = read_record(record, &x->tables[i]))) return rc;
    }
    return 0;
}

/* The last commit, and where its tables are. */
static int64_t read_meta(kvfs_index *x) {
    uint8_t both[META_BYTES], again[META_BYTES];
    int64_t rc = read_now(x->fd.data, both, sizeof both, 0, &x->plain);
    if (rc) return rc;
    for (int i = 0; i < 2; i++) {
        const uint8_t *page = both + i * PAGE;
        if (load64(page) != (uint64_t)i || load16(page + 10) != META || load32(page + HEAD) != MAGIC ||
            load32(page + HEAD + 4) != 1 || load32(page + HEAD + 24) != PAGE)
            return -ENOTSUP;
    }
    const uint8_t *meta = last_meta(both);
    uint64_t txn = load64(meta + 128), last = load64(meta + 120);
    if (txn == x->txn) return 0;
    /* A commit writes its number last, but this read may have overtaken it: then the number is new, and the rest is not */
    if ((rc = read_now(x->fd.data, again, sizeof again, 0, &x->plain))) return rc;
    if (memcmp(both, again, sizeof both)) return KVFS_MOVED;
    if (last > INT64_MAX / PAGE - 1) return -EIO;
    x->txn = 0; /* until all is known */
    x->last_page = last;
    x->leaf_page = 0;
    memset(x->slot_page, 0, sizeof x->slot_page);
    if ((rc = read_tables(x, meta))) {
        int64_t moved = check_moved(x, txn);
        return moved ? moved : rc;
    }
    x->txn = txn;
    return 0;
}

/* Whether CURRENT is still the file that is open, unchanged: a rename over it, an unlink or a write changes its ctime. */
static int64_t check_current(const kvfs_index *x) {
    struct stat st;
    if (fstat(x->fd.file, &st) || !st.st_nlink) return -ESTALE;
    return st.st_ctim.tv_sec * 1000000000ll + st.st_ctim.tv_nsec == x->current_ctime_ns ? 0 : -ESTALE;
}

int64_t index_begin(kvfs_index *x) {
    if (x->pid != getpid()) return -ESTALE;
    if (__atomic_exchange_n(&x->busy, 1, __ATOMIC_ACQUIRE)) return -EAGAIN;
    int64_t rc = __atomic_load_n(&x->open, __ATOMIC_ACQUIRE) ? check_current(x) : -ESTALE;
    if (!rc) rc = read_meta(x);
    if (rc) __atomic_store_n(&x->busy, 0, __ATOMIC_RELEASE);
    else x->calls++;
    return rc;
}

int64_t index_end(kvfs_index *x, int64_t rc) {
    int64_t failed = check_moved(x, x->txn);
    if (failed) rc = failed; /* the next read drops the pages that are kept */
    if ((failed = check_current(x))) rc = failed;
    __atomic_store_n(&x->busy, 0, __ATOMIC_RELEASE);
    return rc;
}

uint64_t kvfs_index_bytes(void) { return sizeof(kvfs_index); }

int64_t kvfs_index_open(kvfs_index *x, const kvfs_descriptors *fd, const kvfs_stamp *current) {
    struct stat st;
    memset(x, 0, offsetof(kvfs_index, leaf)); /* memory of slots that no page needs is never touched */
    x->fd = *fd;
    x->pid = getpid();
    if (fstat(fd->file, &st)) return -errno;
    kvfs_stamp now = {st.st_dev, st.st_ino, st.st_mtim.tv_sec * 1000000000ll + st.st_mtim.tv_nsec,
                      st.st_ctim.tv_sec * 1000000000ll + st.st_ctim.tv_nsec};
    if (memcmp(&now, current, sizeof now)) return -ESTALE;
    x->current_ctime_ns = now.ctime_ns;
    x->open = 1;
    return 0;
}

void kvfs_index_close(kvfs_index *x) {
    __atomic_store_n(&x->open, 0, __ATOMIC_RELEASE);
    /* without the interpreter's lock (free-threaded builds) a call may be in progress */
    while (x->pid == getpid() && __atomic_load_n(&x->busy, __ATOMIC_ACQUIRE)) sched_yield();
}
