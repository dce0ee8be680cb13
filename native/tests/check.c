/* Unit tests of the library in C, so that they run under sanitizers and under an emulator: check FOLDER.
 *
 * An index is made by hand, page by page; then looked up, damaged byte by byte, and looked up again. The comparison with
 * LMDB itself, and with the Python code, is in tests/native. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvfs_native.h"

#define CHECK(what)                                                     \
    do {                                                                \
        if (!(what)) {                                                  \
            fprintf(stderr, "line %d: %s is false\n", __LINE__, #what); \
            exit(1);                                                    \
        }                                                               \
    } while (0)

enum { PAGE = 4096, RUN = 32, CHUNKS = 300, RUNS = 10, FILLERS = 900, PARTS = 70, NOW = 1000000 };
enum { DAMAGES = 30000 };

static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}
static void fill(uint8_t *p, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) p[i] = (uint8_t)draw();
}

/* -- hashes ---------------------------------------------------------------------------------------------------- */

static void hex(const uint8_t *p, int n, char *out) {
    for (int i = 0; i < n; i++) sprintf(out + 2 * i, "%02x", p[i]);
}

static void check_hashes(void) {
    uint8_t out[64], text[3] = {'a', 'b', 'c'};
    char shown[65];
    kvfs_blake2b(text, 3, out);
    hex(out, 32, shown);
    CHECK(!strcmp(shown, "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319"));
    CHECK(kvfs_xxh3_64(NULL, 0, 0) == 0x2d06800538d394c2);
    kvfs_xxh3_128(text, 3, out);
    hex(out, 16, shown);
    CHECK(!strcmp(shown, "06b05ab6733a618578af5f94892f3950"));
    uint8_t seed[32] = {0}, one[32 * 5], other[32 * 5], tokens[5 * 300];
    fill(tokens, sizeof tokens);
    kvfs_extra extra[2] = {{1, 0, 3}, {4, 3, 200}};
    uint8_t keys[203];
    fill(keys, sizeof keys);
    for (uint64_t step = 4; step <= 300; step += 4) { /* what the CPU has, and portable code; at once, and in steps */
        kvfs_portable(0);
        kvfs_chain(tokens, 0, 5, step, seed, extra, 2, keys, one);
        kvfs_portable(1);
        for (uint64_t i = 0; i < 5; i++) kvfs_chain(tokens, i, i + 1, step, seed, extra, 2, keys, other);
        CHECK(!memcmp(one, other, sizeof one));
    }
    uint8_t *data = malloc(5000);
    fill(data, 5000);
    for (uint64_t n = 0; n < 5000; n += n < 300 ? 1 : 37) { /* exactly n bytes: a read behind them is found */
        uint8_t *exact = malloc(n ? n : 1), both[2][16];
        memcpy(exact, data, n);
        uint64_t sums[2];
        for (int portable = 0; portable < 2; portable++) {
            kvfs_portable(portable);
            sums[portable] = kvfs_xxh3_64(exact, n, 77);
            kvfs_xxh3_128(exact, n, both[portable]);
        }
        CHECK(sums[0] == sums[1] && !memcmp(both[0], both[1], 16));
        free(exact);
    }
    kvfs_portable(0);
    free(data);
}

/* -- an index made by hand ----------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t key[64], *value;
    unsigned key_bytes, nbytes;
    int flags; /* 1: on overflow pages, 2: a table's record */
} item;

static uint8_t *image;
static uint64_t image_pages, image_room;

static void put16(uint8_t *p, unsigned x) { uint16_t y = (uint16_t)x; memcpy(p, &y, 2); }
static void put32(uint8_t *p, uint64_t x) { uint32_t y = (uint32_t)x; memcpy(p, &y, 4); }
static void put64(uint8_t *p, uint64_t x) { memcpy(p, &x, 8); }
static unsigned get16(const uint8_t *p) { uint16_t x; memcpy(&x, p, 2); return x; }

static uint64_t new_pages(uint64_t n, int kind) {
    uint64_t first = image_pages;
    image_pages += n;
    CHECK(image_pages <= image_room);
    uint8_t *p = image + first * PAGE;
    put64(p, first);
    put16(p + 10, (unsigned)kind);
    put16(p + 12, 16);
    put16(p + 14, PAGE);
    if (kind == 4) put32(p + 12, n);
    return first;
}

/* Adds a node; 0 if the page is full. */
static int add_node(uint64_t page, unsigned low, unsigned mid, unsigned flags, const uint8_t *key, unsigned key_bytes,
                    const uint8_t *value, unsigned nbytes) {
    uint8_t *p = image + page * PAGE;
    unsigned lower = get16(p + 12), upper = get16(p + 14), size = (8 + key_bytes + nbytes + 1) & ~1u;
    if (lower + 2 + size > upper) return 0;
    upper -= size;
    put16(p + upper, low);
    put16(p + upper + 2, mid);
    put16(p + upper + 4, flags);
    put16(p + upper + 6, key_bytes);
    if (key_bytes) memcpy(p + upper + 8, key, key_bytes);
    if (nbytes) memcpy(p + upper + 8 + key_bytes, value, nbytes);
    put16(p + lower, upper);
    put16(p + 12, lower + 2);
    put16(p + 14, upper);
    return 1;
}

static int by_key(const void *a, const void *b) {
    const item *x = a, *y = b;
    unsigned n = x->key_bytes < y->key_bytes ? x->key_bytes : y->key_bytes;
    int order = memcmp(x->key, y->key, n);
    return order ? order : (int)x->key_bytes - (int)y->key_bytes;
}

/* A tree of items; its record (MDB_db) in out. */
static void make_tree(item *items, unsigned n, uint8_t out[48]) {
    memset(out, 0, 48);
    put64(out + 40, ~0ull);
    if (!n) return;
    qsort(items, n, sizeof *items, by_key);
    item *level = calloc(n, sizeof *level);
    unsigned count = 0, height = 1;
    uint64_t page = 0;
    for (unsigned i = 0; i < n; i++) {
        uint8_t where[8];
        const uint8_t *value = items[i].value;
        unsigned held = items[i].nbytes;
        if (items[i].flags == 1) {
            uint64_t first = new_pages((16 + held + PAGE - 1) / PAGE, 4);
            memcpy(image + first * PAGE + 16, value, held);
            put64(where, first);
            value = where;
            held = 8;
        }
        unsigned low = items[i].nbytes & 0xffff, high = items[i].nbytes >> 16, flags = (unsigned)items[i].flags;
        if (!page || !add_node(page, low, high, flags, items[i].key, items[i].key_bytes, value, held)) {
            page = new_pages(1, 2);
            level[count] = items[i];
            level[count].nbytes = (unsigned)page;
            count++;
            CHECK(add_node(page, low, high, flags, items[i].key, items[i].key_bytes, value, held));
        }
    }
    while (count > 1) {
        unsigned above = 0;
        height++;
        page = 0;
        for (unsigned i = 0; i < count; i++) {
            unsigned low = level[i].nbytes & 0xffff, high = level[i].nbytes >> 16;
            if (!page || !add_node(page, low, high, 0, level[i].key, level[i].key_bytes, NULL, 0)) {
                page = new_pages(1, 1);
                CHECK(add_node(page, low, high, 0, NULL, 0, NULL, 0)); /* the first one has no key */
                memmove(&level[above], &level[i], sizeof *level);
                level[above++].nbytes = (unsigned)page;
            }
        }
        count = above;
    }
    put16(out + 6, height);
    put64(out + 40, level[0].nbytes);
    free(level);
}

static uint8_t hashes[32 * CHUNKS], prefix[37], parts[16];

static void row_key(const uint8_t *hash, const uint8_t *part, uint8_t key[40]) {
    uint8_t named[37 + 32];
    memcpy(named, prefix, 37);
    memcpy(named + 37, hash, 32);
    kvfs_blake2b(named, sizeof named, key);
    memcpy(key + 32, part, 8);
}

/* A row of chunks [first, first + count) in one extent. */
static item make_row(const uint8_t *head, const uint8_t *part, const uint8_t *of, unsigned first, unsigned count,
                     unsigned segment, int claim, unsigned expires) {
    item row = {.key_bytes = 40, .nbytes = 20 + 32 + 48 * count};
    uint8_t *p = row.value = calloc(1, row.nbytes);
    row_key(head, part, row.key);
    p[8] = p[9] = 1;
    put32(p + 12, ((1ull << count) - 1) << first);
    put32(p + 16, 4);
    p[20] = (uint8_t)first;
    p[21] = (uint8_t)count;
    p[23] = (uint8_t)claim;
    put32(p + 24, segment);
    if (!claim) put32(p + 28, 7), put32(p + 32, 1), put32(p + 36, 4096), put32(p + 40, 9), put32(p + 44, 3);
    put32(p + 48, expires);
    memcpy(p + 52, of, 32 * count);
    fill(p + 52 + 32 * count, 16 * count);
    uint64_t seed;
    memcpy(&seed, row.key, 8);
    put64(p, kvfs_xxh3_64(p + 8, row.nbytes - 8, seed));
    return row;
}

static item make_segment(unsigned number, unsigned kind) {
    item row = {.key_bytes = 4, .nbytes = 100};
    uint8_t *p = row.value = calloc(1, 100);
    row.key[2] = (uint8_t)(number >> 8);
    row.key[3] = (uint8_t)number;
    memset(p, (int)number, 16);
    put32(p + 48, kind);
    put64(p + 72, 1000 + number);
    put64(p + 92, kvfs_xxh3_64(p, 92, 0));
    return row;
}

static char path[4096];
static const char *in(const char *folder, const char *name) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}
static int make_file(const char *folder, const char *name, const void *data, size_t n) {
    int fd = open(in(folder, name), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    return fd;
}

static void make_index(void) {
    static item rows[FILLERS + 64], segments[8], known[PARTS + 4], tables[3];
    unsigned n = 0;
    fill(hashes, sizeof hashes);
    fill(prefix, sizeof prefix);
    fill(parts, sizeof parts);
    const uint8_t *h = hashes;
    for (unsigned run = 0; run < RUNS; run++) {
        unsigned first = run * RUN, count = CHUNKS - first < RUN ? CHUNKS - first : RUN;
        if (run == 4) { /* a fork: the run's own row has the chunks of another prompt from 10 on */
            uint8_t mixed[32 * RUN];
            memcpy(mixed, h + 32 * first, sizeof mixed);
            fill(mixed + 320, sizeof mixed - 320);
            rows[n++] = make_row(h + 32 * first, parts, mixed, 0, RUN, 1, 0, 0);
            rows[n++] = make_row(h + 32 * (first + 10), parts, h + 32 * (first + 10), 10, 22, 2, 0, 0);
        } else if (run == 6) { /* stored by two ranks, one of which wrote half of the chunks */
            rows[n++] = make_row(h + 32 * first, parts, h + 32 * first, 0, 16, 1, 0, NOW + 1);
            rows[n++] = make_row(h + 32 * first, parts + 8, h + 32 * first, 0, RUN, 2, 0, 0);
        } else if (run == 8) { /* being written */
            rows[n++] = make_row(h + 32 * first, parts, h + 32 * first, 0, RUN, 1, 1, NOW + 3);
        } else {
            rows[n++] = make_row(h + 32 * first, parts, h + 32 * first, 0, count, run == 9 ? 3 : 1, 0, 0);
            if (run == 3) rows[n - 1].flags = 1;
        }
    }
    for (unsigned i = 0; i < FILLERS; i++, n++) {
        uint8_t hash[32 * 28];
        fill(hash, sizeof hash);
        rows[n] = make_row(hash, parts, hash, 0, 28, 1, 0, 0);
        rows[n].flags = i % 50 == 0;
    }
    segments[0] = make_segment(1, 1); /* active, sealed, dropped */
    segments[1] = make_segment(2, 2);
    segments[2] = make_segment(3, 3);
    for (unsigned i = 0; i < PARTS + 2; i++) { /* parts of group 0; then a key of another length, and of another group */
        known[i] = (item){.key_bytes = 34 + 8, .flags = 0};
        memcpy(known[i].key, prefix, 32);
        known[i].key[33] = i == PARTS + 1;
        known[i].key[34] = (uint8_t)i;
        if (i == PARTS) known[i].key_bytes = 40, known[i].key[34] = 255;
    }
    image_room = 8000;
    image = calloc(image_room, PAGE);
    image_pages = 2;
    uint8_t records[3][48], root[48];
    const char *names[3] = {"pages", "segments", "namespaces"};
    make_tree(rows, n, records[0]);
    make_tree(segments, 3, records[1]);
    make_tree(known, PARTS + 2, records[2]);
    CHECK(get16(records[0] + 6) == 3); /* root, branches, leaves */
    for (int i = 0; i < 3; i++) {
        tables[i] = (item){.key_bytes = (unsigned)strlen(names[i]), .value = records[i], .nbytes = 48, .flags = 2};
        memcpy(tables[i].key, names[i], strlen(names[i]));
    }
    make_tree(tables, 3, root);
    for (unsigned i = 0; i < 2; i++) {
        uint8_t *p = image + i * PAGE;
        put64(p, i);
        put16(p + 10, 8);
        put32(p + 16, 0xBEEFC0DE);
        put32(p + 20, 1);
        put32(p + 40, PAGE);
        memcpy(p + 88, root, 48);
        put64(p + 16 + 120, image_pages - 1);
        put64(p + 16 + 128, 41 + i);
    }
    for (unsigned i = 0; i < n; i++) free(rows[i].value);
    for (unsigned i = 0; i < 3; i++) free(segments[i].value);
}

/* -- lookups ---------------------------------------------------------------------------------------------------------- */

static kvfs_row rows_found[KVFS_ROWS_MAX];
static kvfs_segment segments_found[KVFS_SEGMENTS_MAX];
static uint32_t covered[KVFS_RUNS_MAX], claimed[KVFS_RUNS_MAX];

static void check_walks(kvfs_index *index, kvfs_lookup *lookup, kvfs_walked *w, int main_fd, const char *folder) {
    CHECK(!kvfs_walk(index, lookup, 0, RUNS, 256, 1, w));
    CHECK(w->txn == 42 && w->end == 7 && w->rows_read == 8 + 1 && w->n_rows == 8 && w->n_segments == 2);
    CHECK(covered[4] == 0xffffffff && covered[6] == 0xffff && claimed[4] == 0);
    CHECK(rows_found[4].bits == 0x3ff && rows_found[5].bits == 0xfffffc00 && rows_found[5].run == 4);
    CHECK(segments_found[0].number == 1 && segments_found[0].tail == 1001 && segments_found[0].id[0] == 1);
    lookup->n_parts = 2; /* part 1 has what part 0 lacks */
    static const uint64_t cells[2] = {3, 2};
    lookup->cells = cells;
    CHECK(!kvfs_walk(index, lookup, 5, RUNS, 256, 1, w));
    CHECK(w->end == 8 + 1 && covered[1] == 0xffffffff && covered[3] == 0 && claimed[3] == 0xffffffff);
    lookup->first_is_enough = 0; /* cell 1 is in part 1 alone */
    lookup->n_cells = 2;
    CHECK(!kvfs_walk(index, lookup, 6, 7, 256, 0, w) && covered[0] == 0xffffffff);
    CHECK(!kvfs_walk(index, lookup, 5, 6, 256, 0, w) && covered[0] == 0 && w->rows_read == 1 + 32);
    lookup->n_parts = lookup->n_cells = lookup->first_is_enough = 1;
    static const uint64_t one = 1;
    lookup->cells = &one;
    CHECK(!kvfs_walk(index, lookup, 9, RUNS, 256, 0, w) && covered[0] == 0 && w->n_rows == 0); /* dropped */
    lookup->now_s = NOW + 1; /* expired */
    CHECK(!kvfs_walk(index, lookup, 6, 7, 256, 1, w) && covered[0] == 0);
    lookup->now_s = NOW;
    uint8_t there[CHUNKS];
    CHECK(!kvfs_there(index, lookup, 0, RUN, RUNS, there));
    for (int i = 0; i < RUNS; i++) CHECK(there[i] == 1);
    CHECK(!kvfs_there(index, lookup, 4 * RUN, 1, RUN, there));
    for (int i = 0; i < RUN; i++) CHECK(there[i] == (i == 0 || i == 10));
    CHECK(kvfs_there(index, lookup, 0, 0, KVFS_KEYS_MAX + 1, there) == -E2BIG);
    uint8_t name[34] = {0}, out[8 * 256];
    uint64_t txn = 0;
    memcpy(name, prefix, 32);
    CHECK(kvfs_parts(index, name, 34, out, 256, &txn) == PARTS && txn == 42 && out[8 * 5] == 5);
    txn = 0;
    lookup->known_txn = 41;
    CHECK(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) == KVFS_MOVED && w->txn == 42);
    lookup->known_txn = 42;
    CHECK(kvfs_parts(index, name, 34, out, 3, &txn) == 3);
    w->values_bytes = 2000; /* one row fits: the next call begins behind it */
    CHECK(!kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) && w->end == 1 && w->n_rows == 1);
    w->values_bytes = 1000;
    CHECK(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) == -E2BIG);
    w->values_bytes = 1 << 20;
    CHECK(!kvfs_walk(index, lookup, 0, RUNS, 2, 1, w) && w->end == 2);
    /* another one holds the gate, or waits for it */
    int other = open(in(folder, "main"), O_RDONLY);
    CHECK(!flock(other, LOCK_EX | LOCK_NB));
    CHECK(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) == -EAGAIN);
    CHECK(!flock(other, LOCK_UN) && !kvfs_walk(index, lookup, 0, RUNS, 256, 1, w));
    CHECK(!flock(other, LOCK_EX | LOCK_NB) && !flock(other, LOCK_UN)); /* nothing was left behind */
    close(other);
    other = open(in(folder, "gate"), O_RDONLY);
    CHECK(!flock(other, LOCK_EX | LOCK_NB));
    CHECK(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) == -EAGAIN);
    close(other);
    int child = fork(); /* in a child nothing is touched, least of all the parent's locks */
    if (!child) _exit(flock(main_fd, LOCK_SH) || kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) != -ESTALE);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    flock(main_fd, LOCK_UN);
}

static void look(kvfs_index *index, const kvfs_lookup *lookup, kvfs_walked *w, int64_t outcomes[2]) {
    uint8_t there[32], out[8 * 256], name[34] = {0};
    uint64_t txn = 0;
    for (uint64_t run = 0; run < RUNS;) {
        int64_t rc = kvfs_walk(index, lookup, run, RUNS, 256, (int)(draw() & 1), w);
        outcomes[!!rc]++;
        if (rc) break;
        CHECK(w->end > run && w->end <= RUNS && w->n_rows <= KVFS_ROWS_MAX);
        for (uint64_t i = 0; i < w->n_rows; i++)
            CHECK(rows_found[i].at + rows_found[i].nbytes <= w->values_bytes && rows_found[i].bits);
        run = w->end;
    }
    outcomes[!!kvfs_there(index, lookup, 4 * RUN, 1, 32, there)]++;
    memcpy(name, prefix, 32);
    outcomes[kvfs_parts(index, name, 34, out, 256, &txn) < 0]++;
}

/* Damage of all kinds of pages, up to seven at once. */
static void check_damages(kvfs_index *index, const kvfs_descriptors *fd, const kvfs_stamp *stamp, kvfs_lookup *lookup, kvfs_walked *w) {
    int64_t outcomes[2] = {0, 0};
    uint64_t damaged[7];
    int data = fd->data;
    for (int i = 0; i < DAMAGES; i++) {
        uint64_t page = draw() % (i % 3 ? image_pages : 8), at = draw() % (i % 2 ? 64 : PAGE);
        if (i % 3 == 1) page = image_pages - 1 - draw() % 12; /* roots and branches, made last */
        uint8_t bytes[8];
        fill(bytes, 8);
        if (i % 4 == 0) put64(bytes, draw() % image_pages);
        uint64_t n = 1 + draw() % 8;
        if (at + n > PAGE) at = PAGE - n;
        CHECK(pwrite(data, bytes, n, (off_t)(page * PAGE + at)) == (ssize_t)n);
        damaged[i % 7] = page;
        CHECK(!kvfs_index_open(index, fd, stamp));
        look(index, lookup, w, outcomes);
        for (int j = 0; i % 7 == 6 && j < 7; j++)
            CHECK(pwrite(data, image + damaged[j] * PAGE, PAGE, (off_t)(damaged[j] * PAGE)) == PAGE);
        if (i % 1000 == 0) { /* cut short */
            CHECK(!ftruncate(data, (off_t)(draw() % (image_pages * PAGE))));
            CHECK(!kvfs_index_open(index, fd, stamp));
            look(index, lookup, w, outcomes);
            CHECK(pwrite(data, image, image_pages * PAGE, 0) == (ssize_t)(image_pages * PAGE));
        }
    }
    printf("%d damages: %lld calls answered, %lld refused\n", DAMAGES, (long long)outcomes[0], (long long)outcomes[1]);
}

static void check_lookups(const char *folder) {
    CHECK(!mkdir(in(folder, "index"), 0700));
    int current = make_file(folder, "index/CURRENT", "0123456789abcdef", 16);
    kvfs_descriptors fd = {make_file(folder, "gate", "", 0), make_file(folder, "main", "", 0), open(folder, O_RDONLY), 0,
                           current, make_file(folder, "index/data.mdb", image, image_pages * PAGE)};
    fd.folder = open(in(folder, "index"), O_RDONLY);
    struct stat st;
    CHECK(!fstat(current, &st));
    kvfs_stamp stamp = {st.st_dev, st.st_ino, st.st_mtim.tv_sec * 1000000000ll + st.st_mtim.tv_nsec,
                        st.st_ctim.tv_sec * 1000000000ll + st.st_ctim.tv_nsec};
    kvfs_index *index = malloc(kvfs_index_bytes());
    uint64_t cell = 1;
    kvfs_lookup lookup = {hashes, CHUNKS, RUN, prefix, sizeof prefix, parts, 1, &cell, 1, 1, NOW, 0};
    kvfs_walked w = {.rows = rows_found, .values = malloc(1 << 20), .values_bytes = 1 << 20,
                     .segments = segments_found, .covered = covered, .claimed = claimed};
    CHECK(!kvfs_index_open(index, &fd, &stamp));
    int64_t rc = kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w);
    if (rc == -ENOTSUP || rc == -EAGAIN) { /* an emulator, or a file system, that cannot say what is in memory */
        printf("lookups left out: %s\n", strerror((int)-rc));
    } else {
        check_walks(index, &lookup, &w, fd.main, folder);
        lookup.n_parts = 2;
        lookup.cells = &cell;
        cell = 3;
        check_damages(index, &fd, &stamp, &lookup, &w);
        CHECK(!kvfs_index_open(index, &fd, &stamp));
        CHECK(!kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w));
        kvfs_index_close(index);
        CHECK(kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w) == -ESTALE);
        stamp.ctime_ns++;
        CHECK(kvfs_index_open(index, &fd, &stamp) == -ESTALE);
        stamp.ctime_ns--;
        char other[4096];
        strcpy(other, in(folder, "other"));
        CHECK(!rename(in(folder, "gate"), other)); /* the lock file was replaced: a lock on it excludes none */
        CHECK(!kvfs_index_open(index, &fd, &stamp));
        rc = kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w);
        CHECK(rc == -ESTALE || rc == -EAGAIN); /* a name that is not cached */
        close(make_file(folder, "gate", "", 0));
        CHECK(kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w) == -ESTALE);
        CHECK(!rename(other, in(folder, "gate")));
        CHECK(!kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w));
        close(make_file(folder, "index/new", "0123456789abcdef", 16)); /* another generation */
        strcpy(other, in(folder, "index/new"));
        CHECK(!rename(other, in(folder, "index/CURRENT")));
        CHECK(kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w) == -ESTALE);
        int taken = open(in(folder, "main"), O_RDONLY);
        CHECK(!flock(taken, LOCK_EX | LOCK_NB)); /* an error leaves no lock behind either */
        close(taken);
    }
    free(index);
    free(w.values);
    free(image);
    int all[] = {fd.gate, fd.main, fd.root, fd.folder, fd.file, fd.data};
    for (int i = 0; i < 6; i++) close(all[i]);
}

/* -- payloads ---------------------------------------------------------------------------------------------------------- */

static void check_payloads(const char *folder) {
    enum { N = 300000, LEAF = 4096 };
    uint8_t *data = malloc(N), *memory = calloc(1, N);
    fill(data, N);
    int fd = make_file(folder, "payload", "", 0);
    kvfs_span spans[4] = {{data, 1000}, {data + 1000, 0}, {data + 1000, 200000}, {data + 201000, N - 201000}};
    int64_t done = 0;
    while (done < N) {
        int64_t now = kvfs_write(fd, spans, 4, 4096, (uint64_t)done, 70001);
        CHECK(now > done);
        done = now;
    }
    CHECK(kvfs_write(fd, spans, 4, 4096, N, 1) == N && kvfs_write(-1, spans, 4, 0, 0, 10) == -EBADF);
    uint64_t table[80] = {0}, next = 0;
    uint8_t left[2] = {0, 0}, expected[8 * 80], roots[16], root[16];
    kvfs_job jobs[2] = {{fd, 0, 4096, 0, 102400, LEAF, 0, 0}, {fd, 0, 4096 + 102400, 102400, N - 102400, LEAF, 25, 13}};
    int64_t got = kvfs_read(jobs, 2, 13 + 25, 8192, memory, table, &next, left, 1000);
    if (got >= 0 && !left[0]) {
        CHECK(got == 38 && !left[1] && !memcmp(memory, data, N));
        kvfs_sum(data, N, LEAF, expected);
        CHECK(!memcmp(expected, table, 8 * 74));
        jobs[1].offset += 1 << 20; /* behind the end of the file */
        next = 0;
        got = kvfs_read(jobs, 2, 38, 8192, memory, table, &next, left, 1000);
        CHECK(got >= 13 && left[1] && !left[0]);
        jobs[0].fd = -1;
        left[0] = left[1] = 0;
        next = 0;
        CHECK(kvfs_read(jobs, 2, 38, 8192, memory, table, &next, left, 5) == 0 && left[0] && next == 5);
    } else {
        printf("reads left out: %lld\n", (long long)got);
        kvfs_sum(data, N, LEAF, expected);
    }
    kvfs_record record = {data, N, LEAF, memory, 8 * 74, root};
    kvfs_sum_records(&record, 1);
    kvfs_roots(expected, 1, 8 * 74, roots);
    CHECK(!memcmp(memory, expected, 8 * 74) && !memcmp(root, roots, 16));
    record.leaf = 0;
    kvfs_sum_records(&record, 1);
    CHECK(!memcmp(root, roots, 16));
    close(fd);
    free(data);
    free(memory);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 && kvfs_abi() == KVFS_ABI);
    printf("features %u\n", kvfs_features());
    check_hashes();
    make_index();
    check_lookups(argv[1]);
    check_payloads(argv[1]);
    puts("ok");
    return 0;
}
