/* The native fast path of kvfs: hash chains, lookups in the index, reads and appends of payloads.
 *
 * Plain C ABI for ctypes: no Python.h, no global state but what the CPU has, no thread, no
 * allocation, no signal handler. Python stays the reference: each function gives the result of the Python code that its
 * comment names, or a negative errno value, after which the caller takes the Python path.
 *
 * Rules for all functions:
 *  - Pointers are valid for the lengths that are given with them. Numbers from Python are right; bytes of files are not
 *    trusted: each offset and length read from a file is checked before it is used.
 *  - kvfs_walk, kvfs_there, kvfs_parts never wait, neither for a disk (RWF_NOWAIT or cachestat) nor for a lock: they take
 *    none. kvfs_hold asks no disk for a name (RESOLVE_CACHED), and tries a lock once. All of them are called with
 *    the interpreter held.
 *  - kvfs_read, kvfs_copy, kvfs_sum, kvfs_roots, kvfs_write, kvfs_cells, kvfs_load are called with the interpreter
 *    released. They touch only memory that the caller keeps alive. kvfs_publish to kvfs_leased are called with it held.
 */
#ifndef KVFS_NATIVE_H
#define KVFS_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define KVFS_ABI 10 /* changes with any signature or struct below; the loader refuses another one */
#define KVFS_PUBLIC __attribute__((visibility("default")))

enum { KVFS_FEATURE_SHA = 1, KVFS_FEATURE_AVX2 = 2, KVFS_FEATURE_NEON = 4 };

KVFS_PUBLIC uint32_t kvfs_abi(void);

/* Bits of KVFS_FEATURE_*: what this CPU has and the functions use. Without SHA, hashlib is faster than kvfs_chain. */
KVFS_PUBLIC uint32_t kvfs_features(void);

/* For tests: use portable code from now on (yes != 0), or what the CPU has. Not thread-safe. */
KVFS_PUBLIC void kvfs_portable(int yes);

/* -- hashes -------------------------------------------------------------------------------------------------- */

/* An extra key of one chunk: bytes [offset, offset + nbytes) of a buffer. */
typedef struct {
    uint64_t chunk, offset, nbytes;
} kvfs_extra;

/* kvfs.pages.chunk_hash.chain of chunks [first, end): out[i] = SHA-256(out[i - 1] + chunk i + extra key of chunk i), 32
 * bytes each; the seed stands for out[-1].
 * Pre: tokens has end * step bytes; seed has seed_bytes, which may be 0; out has 32 * end, filled up to ``first``; extra
 * has n_extra entries with ascending chunk numbers, whose ranges are inside extra_bytes. Post: out is filled up to
 * ``end``. */
KVFS_PUBLIC void kvfs_chain(
    const uint8_t *tokens, uint64_t first, uint64_t end, uint64_t step, const uint8_t *seed, uint64_t seed_bytes,
    const kvfs_extra *extra, uint64_t n_extra, const uint8_t *extra_bytes, uint8_t *out);

/* kvfs.pages.chunk_hash.chunk_of_key of keys of one length: out[i] = SHA-256(head + key i), 32 bytes each.
 * Pre: keys has count * key_bytes bytes, out 32 * count. */
KVFS_PUBLIC void kvfs_keys(
    const uint8_t *head, uint64_t head_bytes, const uint8_t *keys, uint64_t key_bytes, uint64_t count, uint8_t *out);

/* BLAKE2b-256 of data. Post: out has 32 bytes. */
KVFS_PUBLIC void kvfs_blake2b(const uint8_t *data, uint64_t nbytes, uint8_t *out);

/* XXH3-64 with a seed. */
KVFS_PUBLIC uint64_t kvfs_xxh3_64(const uint8_t *data, uint64_t nbytes, uint64_t seed);

/* XXH3-128 without a seed, in the canonical (big endian) order of xxhash.xxh3_128_digest: 16 bytes in out. */
KVFS_PUBLIC void kvfs_xxh3_128(const uint8_t *data, uint64_t nbytes, uint8_t *out);

/* -- lookups ------------------------------------------------------------------------------------------------- */

/* One open generation of an index, in memory that the caller owns (kvfs_index_bytes of it, any content). */
typedef struct kvfs_index kvfs_index;

/* What CURRENT was when the generation was opened (kvfs.index.environment._version). */
typedef struct {
    uint64_t device, inode;
    int64_t mtime_ns, ctime_ns;
} kvfs_stamp;

/* Descriptors. file: of CURRENT; data: of the generation's data.mdb. */
typedef struct {
    int32_t file, data;
} kvfs_descriptors;

KVFS_PUBLIC uint64_t kvfs_index_bytes(void);

/* Pre: index has kvfs_index_bytes() bytes, aligned to 8. The caller closes the descriptors after kvfs_index_close.
 * Post: 0; -ESTALE: CURRENT is not what ``current`` says; or -errno of fstat. What the index file contains is checked by each
 * call that reads it. */
KVFS_PUBLIC int64_t kvfs_index_open(
    kvfs_index *index, const kvfs_descriptors *descriptors, const kvfs_stamp *current);

/* Post: each later call on the index returns -ESTALE and touches no descriptor. Holds in a forked child, too. */
KVFS_PUBLIC void kvfs_index_close(kvfs_index *index);

enum { KVFS_MOVED = -4096 }; /* no errno value */

/* What a walk looks for. Pre for all fields: see there. */
typedef struct {
    const uint8_t *hashes;   /* chunk hashes, 32 bytes each, in the order of the prompt */
    uint64_t chunks;         /* how many */
    uint64_t run_length;     /* 32, or 1 for opaque keys: chunks of a row */
    const uint8_t *prefix;   /* what goes before a chunk hash in a page key: digest, length of the group's name, name */
    uint64_t prefix_bytes;   /* at most KVFS_PREFIX_MAX */
    const uint8_t *parts;    /* packed parts, 8 bytes each, the most useful first */
    uint64_t n_parts;        /* 1 to KVFS_PARTS_MAX */
    const uint64_t *cells;   /* for each elementary rectangle: the set of parts that contain it, bit i = part i */
    uint64_t n_cells;        /* 1 to KVFS_CELLS_MAX */
    uint64_t first_is_enough; /* 1: part 0 contains what is wanted */
    uint64_t now_s;          /* unix seconds */
    uint64_t known_txn;      /* commit that the parts were read at; 0: do not compare */
} kvfs_lookup;

enum {
    KVFS_PREFIX_MAX = 128,
    KVFS_PARTS_MAX = 64,
    KVFS_CELLS_MAX = 256,
    KVFS_RUNS_MAX = 256,
    KVFS_ROWS_MAX = 512,
    KVFS_SEGMENTS_MAX = 4096,
    KVFS_KEYS_MAX = 1024 /* keys that one call looks for: about 2 ms */
};

/* A row that has live chunks of a run. */
typedef struct {
    uint32_t run, part;      /* part: number in kvfs_lookup.parts */
    uint32_t bits;           /* live chunks that no earlier row of this part has, relative to the run */
    uint32_t nbytes;         /* of the row's value, which kvfs_walked.values has from ``at`` on */
    uint64_t at;
    uint8_t key[40];
} kvfs_row;

typedef struct {
    uint32_t number, zero;
    uint64_t tail;           /* end of what is published */
    uint8_t id[16];
} kvfs_segment;

/* For tests: kvfs.index.rows.parse_row accepts a value of the table ``pages``. key has 40 bytes. */
KVFS_PUBLIC int kvfs_is_row(const uint8_t *key, const uint8_t *value, uint64_t nbytes);

/* Results of a walk. The caller gives the buffers and their sizes. */
typedef struct {
    kvfs_row *rows;          /* KVFS_ROWS_MAX */
    uint8_t *values;         /* values_bytes */
    uint64_t values_bytes;
    kvfs_segment *segments;  /* KVFS_SEGMENTS_MAX: those of live chunks, each once */
    uint32_t *covered;       /* KVFS_RUNS_MAX: of each run that was read, chunks whose parts cover what is wanted */
    uint32_t *claimed;       /* KVFS_RUNS_MAX: chunks that are being written */
    /* out */
    uint64_t n_rows, n_segments;
    uint64_t n_values;       /* bytes of values that are used */
    uint64_t end;            /* the run that follows the last one that was read */
    uint64_t rows_read;      /* keys that were looked for */
    uint64_t txn;            /* number of the last commit */
} kvfs_walked;

/* Pages of keys that are neighbours in the prompt and in a segment. */
typedef struct {
    uint32_t chunk, pages;   /* how many, from ``chunk`` on */
    uint32_t segment, codec;
    uint32_t stored, leaves; /* bytes of one page, leaves of it */
    uint32_t seq;            /* record of the first one; the others follow */
    uint32_t step;           /* blocks from one to the next; 0: there is one */
    uint64_t block, leaf;    /* of the first one; leaf tables follow one another, or are all 0 */
} kvfs_stretch;

/* kvfs.index.rows.Row.stretches of the rows of one part that a walk with run_length 1 has returned, joined.
 * Pre: ``values`` is what the walk filled; out has n_rows entries, roots 16 * n_rows bytes.
 * Post: the number of stretches; roots has those of their pages, in the same order. */
KVFS_PUBLIC uint64_t kvfs_stretches(
    const kvfs_row *rows, uint64_t n_rows, const uint8_t *values, uint32_t part, kvfs_stretch *out, uint8_t *roots);

/* kvfs.lookup.search.GroupLookup.read_runs: reads the rows of runs [first, end) as of one commit, at most
 * rows_max keys (more only within the last run), up to and including the first run that is not covered as a whole.
 * stop_at_gap: within a run and part, nothing is looked for behind the first chunk that has no row. The rows are checked
 * as kvfs.index.rows.parse_row does; damaged ones are absent.
 * Pre: first < end <= number of runs; end - first <= KVFS_RUNS_MAX.
 * Post: 0 and walked is filled, at least one run was read; or, with nothing of walked but txn meaningful:
 *  KVFS_MOVED the last commit is txn and not known_txn; or, with txn 0, several were made meanwhile
 *  -EAGAIN   a page is not in the page cache, or a commit is being written
 *  -ESTALE   closed, forked, or CURRENT is another
 *  -EIO      the file contradicts itself
 *  -ENOTSUP  the kernel does not say what is in memory, or another LMDB
 *  -E2BIG    a buffer or a limit above is too small for one run */
KVFS_PUBLIC int64_t kvfs_walk(
    kvfs_index *index, const kvfs_lookup *lookup, uint64_t first, uint64_t end, uint64_t rows_max, int stop_at_gap,
    kvfs_walked *walked);

/* Session.keys_there for the rows that chunks first, first + stride, ... may head, as of one commit.
 * Pre: the last of the count chunks is below lookup->chunks; there has count bytes; count times parts is at most
 * KVFS_KEYS_MAX, otherwise -E2BIG.
 * Post: 0 and there[i] = 1 if any of the parts has such a row, damaged or not, else 0; or an error of kvfs_walk. */
KVFS_PUBLIC int64_t kvfs_there(
    kvfs_index *index, const kvfs_lookup *lookup, uint64_t first, uint64_t stride, uint64_t count, uint8_t *there);

/* Session.parts: what is behind ``prefix`` in the keys of table ``namespaces`` that begin with it, 8 bytes each; keys of
 * other lengths are left out.
 * Pre: out has 8 * parts_max bytes.
 * Post: the number of parts, at most parts_max, and the number of the last commit in txn; or an error of kvfs_walk. */
KVFS_PUBLIC int64_t kvfs_parts(
    kvfs_index *index, const uint8_t *prefix, uint64_t prefix_bytes, uint8_t *out, uint64_t parts_max, uint64_t *txn);

/* -- segments ------------------------------------------------------------------------------------------------- */

/* Segments that a process has open for reading, under shared locks: each once, with a count of its holds. In memory that
 * the caller owns: kvfs_files_bytes of zeros, aligned to 8. */
typedef struct kvfs_files kvfs_files;

enum { KVFS_FILES_MAX = 4096 }; /* open at once; Python opens more */

KVFS_PUBLIC uint64_t kvfs_files_bytes(void);
KVFS_PUBLIC void kvfs_files_init(kvfs_files *files);

/* Holds ``count`` segments, ids of 16 bytes each: those that are not open yet are opened as SegmentFiles._open_locked does,
 * <id>.kvs in the directory ``folder``. Asks no disk for a name, waits for no lock.
 * Post: held[i] is the number of the hold's file, or -1: the Python path has to look. Returns how many are not -1. In a
 * forked child nothing is done: 0. */
KVFS_PUBLIC uint64_t kvfs_hold(kvfs_files *files, int folder, const uint8_t *ids, uint64_t count, int32_t *held);

/* Ends holds; -1 is none. A file without holds is closed, except one without a name: to close that frees blocks, which
 * takes long.
 * Post: held is -1, or below it where such a file is left to kvfs_close. Returns how many are. May be called again with the
 * same numbers, by any thread: it ends no hold twice. */
KVFS_PUBLIC uint64_t kvfs_release(kvfs_files *files, int32_t *held, uint64_t count);

/* Closes the files that kvfs_release has left. Called with the interpreter released, by any thread. Post: held is -1. */
KVFS_PUBLIC void kvfs_close(int32_t *held, uint64_t count);

/* Descriptor of a file that is held; -1 of -1. */
KVFS_PUBLIC int kvfs_file(const kvfs_files *files, int32_t held);

/* How many are open. */
KVFS_PUBLIC uint64_t kvfs_files_open(const kvfs_files *files);

/* In a forked child: closes the descriptors, which leaves the parent's locks. Each later call does nothing. */
KVFS_PUBLIC void kvfs_files_abandon(kvfs_files *files);

/* -- payloads ------------------------------------------------------------------------------------------------ */

/* A stretch of a file for a stretch of memory (kvfs.read.plan.ReadJob). */
typedef struct {
    int32_t fd;
    int32_t zero;
    int64_t offset;          /* in the file */
    uint64_t at, nbytes;     /* in memory */
    uint64_t leaf;           /* bytes of a leaf; 0: not summed */
    uint64_t table;          /* number of its first leaf in the table */
    uint64_t piece;          /* number of its first piece; ascending */
} kvfs_job;

/* Fetcher._read_pieces: reads pieces of ``step`` bytes that the page cache has, and sums their leaves (XXH3-64, little
 * endian, into ``table``), until no piece or ``most`` pieces are left. Threads share ``next``.
 * Pre: jobs ascend by piece, each has ceil(nbytes / step) pieces, n_pieces in all; step is a multiple of each leaf;
 * left has one byte per job. Post: the number of pieces read by this call, or -ENOTSUP where the file system
 * does not say what is in memory; left[job] = 1 where a piece could not be had at once: its memory and table are undefined. */
KVFS_PUBLIC int64_t kvfs_read(
    const kvfs_job *jobs, uint64_t n_jobs, uint64_t n_pieces, uint64_t step, uint8_t *memory, uint64_t *table,
    uint64_t *next, uint8_t *left, uint64_t most);

/* Bytes of a stream for a stretch of a file. */
typedef struct {
    uint64_t at, nbytes;     /* in the stream */
    int64_t offset;          /* in the file */
} kvfs_spot;

/* Fetcher.copy: reads pieces like kvfs_read, but waits for a disk, sums their leaves, and writes them into the file ``to``,
 * until no piece or ``most`` pieces are left. ``at`` of a job is its place in the stream; what no spot has is not written.
 * Pre: as of kvfs_read; leaf of each job is not 0; memory has step bytes, of the calling thread alone, aligned as the
 * descriptors need it. Post: the number of pieces copied by this call; or -errno, and no thread begins another piece:
 * the table, and the file at all spots, are undefined. */
KVFS_PUBLIC int64_t kvfs_copy(
    const kvfs_job *jobs, uint64_t n_jobs, uint64_t n_pieces, uint64_t step, uint8_t *memory, uint64_t *table,
    uint64_t *next, const kvfs_spot *spots, uint64_t n_spots, int to, uint64_t most);

/* root_of of each of ``count`` leaf tables of ``nbytes`` bytes, one behind the other: 16 bytes each in out. */
KVFS_PUBLIC void kvfs_roots(const uint8_t *tables, uint64_t count, uint64_t nbytes, uint8_t *out);

/* leaf_table of ``nbytes`` bytes, leaves of ``leaf`` bytes (the last one may be shorter): into table. */
KVFS_PUBLIC void kvfs_sum(const uint8_t *data, uint64_t nbytes, uint64_t leaf, uint8_t *table);

/* A record of an append. */
typedef struct {
    const uint8_t *payload;
    uint64_t nbytes;
    uint64_t leaf;           /* bytes of a leaf; 0: ``table`` has its leaf table already */
    uint8_t *table;          /* table_bytes: its leaf table goes, or is, here */
    uint64_t table_bytes;
    uint8_t *root;           /* 16 bytes: root of the table */
} kvfs_record;

/* Leaf tables and roots of records. Pre: table_bytes = 8 * ceil(nbytes / leaf) where leaf is not 0.
 * Post: table and root of each are filled. */
KVFS_PUBLIC void kvfs_sum_records(const kvfs_record *records, uint64_t count);

/* A piece of memory to write. */
typedef struct {
    const uint8_t *data;
    uint64_t nbytes;
} kvfs_span;

/* Files.write_all, from byte ``from`` of the spans on: gathered writes at offset + from, each of at most ``most`` bytes.
 * Post: bytes written so far, ``from`` included, if all was written, a signal came, or ``most`` bytes were written by
 * this call; or -errno. -EIO: a write made no progress. */
KVFS_PUBLIC int64_t kvfs_write(
    int fd, const kvfs_span *spans, uint64_t count, int64_t offset, uint64_t from, uint64_t most);

/* kvfs_sum_records, then kvfs_write from byte 0 on: the leaf tables may be among the spans. */
KVFS_PUBLIC int64_t kvfs_append(
    const kvfs_record *records, uint64_t n_records, int fd, const kvfs_span *spans, uint64_t count, int64_t offset,
    uint64_t most);

/* -- cells --------------------------------------------------------------------------------------------------- */

/* What the pages of one part and one buffer of an engine share (kvfs.pages.device_kv.KVBuffer). Strides in bytes. */
typedef struct {
    uint64_t states, granule_states;   /* of a page; of one of its granules */
    uint64_t unit_states;              /* of a unit */
    uint64_t page_layers, page_heads;  /* of the part */
    uint64_t heads;                    /* that the buffer and the part share */
    uint64_t cell, nbytes;             /* bytes of a cell; those that the buffer has of it */
    uint64_t page_at;                  /* of the first of these, from the beginning of a row of a granule */
    uint64_t first;                    /* states of the prompt before this one are left alone */
    uint64_t first_unit;               /* number of the unit of the prompt that units[0] is */
    int64_t unit_step, state_step, head_step;
} kvfs_shape;

/* A layer that the buffer and the part share. */
typedef struct {
    uint64_t row;            /* in the part */
    uint8_t *base;           /* of (unit 0, state 0, the first shared head) */
} kvfs_layer;

typedef struct {
    uint8_t *memory;
    uint64_t state;          /* of the prompt: the page's first */
} kvfs_page;

/* kvfs.pages.host_copy: copies the cells of pages from the buffer (to_page != 0) or to it. units[i]: the unit with the
 * states of the prompt from (first_unit + i) * unit_states on; -1: there is none.
 * Pre: units has all units of all states of the pages that are not before ``first``; every cell of the buffer that they
 * name is memory of the caller. */
KVFS_PUBLIC void kvfs_cells(
    const kvfs_shape *shape, const kvfs_layer *layers, uint64_t n_layers, const kvfs_page *pages, uint64_t n_pages,
    const int64_t *units, int to_page);

/* Where the cells of a part are, in one buffer of an engine. */
typedef struct {
    kvfs_shape shape;
    const kvfs_layer *layers;
    uint64_t n_layers;
} kvfs_target;

/* Pages of a load that are neighbours in the prompt and evenly spaced in a file (kvfs.read.plan.Run). */
typedef struct {
    int32_t fd;
    uint32_t load;           /* number of the load that they are part of */
    int64_t offset;          /* in the file */
    uint64_t stride, nbytes; /* from one page to the next; bytes of a page */
    uint64_t leaf;           /* bytes of a leaf; 0: not verified */
    uint64_t page;           /* number of its first page; ascending */
    uint64_t state;          /* of the prompt: the first page's first */
    const int64_t *units;    /* as for kvfs_cells */
    const kvfs_target *targets;
    uint64_t n_targets;
} kvfs_load_run;

enum { KVFS_LOAD_FAILED = 1u << 30 }; /* of kvfs_load: a page could not be had at once, or has another root */

/* Reader.scatter_at_once: reads pages that the page cache has, one by one, compares the root of each with that in roots
 * (16 bytes each, by number of the page), and copies its cells to the engine, until no page or ``most`` pages are left.
 * Threads share ``next`` and ``left``. A page that does not verify is not copied.
 * Pre: runs ascend by page, n_pages in all; memory, of the calling thread alone, has room for a page and 8 bytes for
 * each of its leaves; left[load] is the number of pages of a load; targets and units as for kvfs_cells.
 * Post: the number of pages copied by this call, or -ENOTSUP where the file system does not say what is in memory.
 * left[load] is the number of its pages that were not copied, with KVFS_LOAD_FAILED once one of them could not be. */
KVFS_PUBLIC int64_t kvfs_load(
    const kvfs_load_run *runs, uint64_t n_runs, const uint8_t *roots, uint64_t n_pages, uint8_t *memory,
    uint64_t *next, uint32_t *left, uint64_t most);

/* -- ranks ------------------------------------------------------------------------------------------------------ */

enum {
    KVFS_WAYS = 8,         /* entries of a bucket; a hash has two */
    KVFS_NONCE_BITS = 24,  /* of the state of a lease; its deadline is above them, in ms */
    KVFS_GRACE_MS = 1000   /* a slot is taken from a reader that is so late */
};

/* Prefixes of one group that the GPU of a rank holds, in shared memory that only this rank, their owner, writes. An
 * entry is a page: its chunk hash, the units that hold it, the sums of its leaves. A page that finds its two buckets full
 * replaces the one of them that was published first.
 * Readers take no lock: each entry has a number (seq) that changes with every change of it. A reader that found a page,
 * copied it and then sees the same seq has copied what was published: the owner retracts pages before it reuses their
 * units. ``held`` is the owner's own memory: units * per_unit numbers of entries, all ones for none. */
typedef struct {
    uint8_t *entries;      /* buckets * KVFS_WAYS * entry_bytes, aligned to 8; zeros at first */
    uint64_t buckets, entry_bytes;
    uint64_t n_units;      /* of a page */
    uint64_t n_leaves;     /* of a page */
    uint64_t per_unit;     /* pages of a unit that holds several; else 1 */
} kvfs_prefixes;

/* What an entry takes: a multiple of 8. */
KVFS_PUBLIC uint64_t kvfs_entry_bytes(uint64_t n_units, uint64_t n_leaves);

/* Owner: publish n pages. subs: number of each within its unit, below per_unit. Pre: units are below those of held.
 * stamp: ascending from call to call. What was published of these units before is retracted. */
KVFS_PUBLIC void kvfs_publish(
    const kvfs_prefixes *prefixes, uint32_t *held, const uint8_t *hashes, const uint32_t *subs, const uint32_t *units,
    const uint64_t *leaves, uint64_t n, uint64_t stamp);

/* Owner: retract all pages in n units. Post: numbers of their entries in out, which has room for n * per_unit. */
KVFS_PUBLIC uint64_t kvfs_retract(
    const kvfs_prefixes *prefixes, uint32_t *held, const uint32_t *units, uint64_t n, uint32_t *out);

/* Any process: look n hashes up, until misses_max are not there. Post: how many were looked up; of each its entry (all
 * ones: none) and that entry's seq. */
KVFS_PUBLIC uint64_t kvfs_held(
    const kvfs_prefixes *prefixes, const uint8_t *hashes, uint64_t n, uint64_t misses_max, uint32_t *entries,
    uint64_t *seqs);

/* How pages of one group are read: states of a page, its granules of step states, the units of the rank, and the head of
 * a work list (kvfs/kernels/work_list.py) for pages from the first one on. */
enum { KVFS_HEAD_WORDS = 16, KVFS_HEAD_LEAVES = 11, KVFS_GRANULE_WORDS = 3 };
typedef struct {
    uint64_t states, granules, step, units_max;
    int64_t head[KVFS_HEAD_WORDS];
} kvfs_pull;

/* Reader: what a copy of n pages needs, until one whose entry does not have its seq or names a unit that is none. Of
 * each page its units and its leaves; and one work list behind the other, of as many pages as batches says, which add
 * up to n, each at an even word: the head, with its number of granules and the address of its own leaves, and of each
 * granule the words of kvfs/kernels/pull.py: its first token in units, its first token in the prompt, and the page's
 * number from first on. Returns how many pages; of the work lists those that begin with one of them are written, the
 * last one in part. */
KVFS_PUBLIC uint64_t kvfs_pull_list(
    const kvfs_prefixes *prefixes, const kvfs_pull *pull, const uint32_t *entries, const uint64_t *seqs,
    const uint32_t *chunks, uint64_t n, uint64_t first, const uint32_t *batches, int64_t *units, uint64_t *leaves,
    int64_t *words);

/* Any process: good: 1 if the entry still has this seq, and its flag is 0. flags: NULL for none. Returns how many are
 * good. */
KVFS_PUBLIC uint64_t kvfs_unchanged(
    const kvfs_prefixes *prefixes, const uint32_t *entries, const uint64_t *seqs, const int32_t *flags, uint64_t n,
    uint8_t *good);

/* Leases of readers on entries of one rank, in shared memory that all of them write: n_slots of slot_bytes, a state and
 * then one bit for each entry; zeros at first. */
typedef struct {
    uint8_t *slots; /* aligned to 8 */
    uint64_t n_slots, slot_bytes;
} kvfs_leases;

/* Reader: take a slot for a lease with this state (deadline and nonce, not 0), on nothing yet: its number; -EBUSY: all
 * are taken. */
KVFS_PUBLIC int64_t kvfs_lease(const kvfs_leases *leases, uint64_t state, uint64_t now_ms);

/* Reader: the lease is also on entries first + each of n. Pre for protection: the reader asks kvfs_unchanged
 * afterwards, and reads only what is good. */
KVFS_PUBLIC void kvfs_lease_entries(
    const kvfs_leases *leases, uint64_t slot, uint64_t first, const uint32_t *entries, uint64_t n);

/* Reader: end it. Harmless if its slot was taken meanwhile. */
KVFS_PUBLIC void kvfs_end_lease(const kvfs_leases *leases, uint64_t slot, uint64_t state);

/* Owner, after kvfs_retract: busy: 1 if a lease whose deadline has not passed has the entry. Returns how many are. */
KVFS_PUBLIC uint64_t kvfs_leased(
    const kvfs_leases *leases, uint64_t now_ms, const uint32_t *entries, uint64_t n, uint8_t *busy);

#endif
