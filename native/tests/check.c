/* Unit tests of the library in C, so that they run under sanitizers and under an emulator: check FOLDER.
 *
 * An index is made by hand; then looked up, damaged byte by byte, and looked up again. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hash.h"
#include "image.h"

enum { DAMAGES = 30000 };

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
        for (uint64_t n = 0; n <= 32; n += 32) { /* without a seed, and with one */
            kvfs_portable(0);
            kvfs_chain(tokens, 0, 5, step, seed, n, extra, 2, keys, one);
            kvfs_portable(1);
            for (uint64_t i = 0; i < 5; i++) kvfs_chain(tokens, i, i + 1, step, seed, n, extra, 2, keys, other);
            CHECK(!memcmp(one, other, sizeof one));
            for (int portable = 0; portable < 2; portable++) { /* of keys, each is the first of a chain of its own */
                kvfs_portable(portable);
                kvfs_keys(seed, n, tokens, step, 5, one);
                for (int i = 0; i < 5; i++) kvfs_chain(tokens + i * step, 0, 1, step, seed, n, NULL, 0, NULL, other + 32 * i);
                CHECK(!memcmp(one, other, sizeof one));
            }
        }
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
        for (int portable = 0; portable < 2 && n > 240; portable++) { /* in parts */
            kvfs_lanes acc;
            uint64_t at = 0;
            kvfs_portable(portable);
            kvfs_xxh3_begin(&acc);
            for (; n - at > 2048; at += 1024) kvfs_xxh3_more(&acc, exact + at, 1024);
            CHECK(kvfs_xxh3_end(&acc, exact + at, n - at, n) == kvfs_xxh3_64(exact, n, 0));
            kvfs_xxh3_begin(&acc);
            kvfs_xxh3_more(&acc, exact, (n - 1) / 1024 * 1024); /* the last part is as short as it can be */
            at = (n - 1) / 1024 * 1024;
            CHECK(kvfs_xxh3_end(&acc, exact + at, n - at, n) == kvfs_xxh3_64(exact, n, 0));
        }
        free(exact);
    }
    kvfs_portable(0);
    free(data);
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

/* -- lookups ---------------------------------------------------------------------------------------------------------- */

static kvfs_row rows_found[KVFS_ROWS_MAX];
static kvfs_segment segments_found[KVFS_SEGMENTS_MAX];
static uint32_t covered[KVFS_RUNS_MAX], claimed[KVFS_RUNS_MAX];
static kvfs_stretch stretches[KVFS_ROWS_MAX];
static uint8_t roots[16 * KVFS_ROWS_MAX];

/* What another process does before the ``hook_at``-th read from now on. */
static uint64_t hook_at, hook_txn;
static int hook_file, hook_rubbish;

static void commit(uint64_t txn) {
    uint64_t meta = txn % 2 ? 0 : 1; /* as in the image: 41 and 42 */
    CHECK(pwrite(hook_file, &txn, 8, (off_t)(meta * PAGE + 16 + 128)) == 8);
}

int64_t kvfs_read_hook(uint8_t *to, uint64_t nbytes, uint64_t offset) {
    (void)to, (void)nbytes, (void)offset;
    if (!hook_at || --hook_at) return 1;
    for (uint64_t txn = 43; txn <= hook_txn; txn++) commit(txn);
    if (hook_rubbish) {
        uint8_t rubbish[PAGE];
        fill(rubbish, PAGE);
        for (uint64_t page = 2; page < image_pages; page++)
            CHECK(pwrite(hook_file, rubbish, PAGE, (off_t)(page * PAGE)) == PAGE);
    }
    return 1;
}

static void mend(void) { CHECK(pwrite(hook_file, image, image_pages * PAGE, 0) == (ssize_t)(image_pages * PAGE)); }

/* Other processes commit during a walk, before each of its reads in turn. */
static void check_commits(kvfs_index *index, const kvfs_descriptors *fd, const kvfs_stamp *stamp, kvfs_lookup *lookup, kvfs_walked *w) {
    hook_file = fd->data;
    for (uint64_t at = 1, fired = 1; fired; at++) { /* one commit: what was read stays what it was */
        CHECK(!kvfs_index_open(index, fd, stamp));
        hook_at = at, hook_txn = 43;
        int64_t rc = kvfs_walk(index, lookup, 0, RUNS, 256, 1, w);
        fired = !hook_at;
        if (at == 2) CHECK(rc == KVFS_MOVED && w->txn == 0); /* the meta page changes while it is read */
        else CHECK(!rc && w->txn == (at == 1 ? 43 : 42) && w->n_rows == 8 && covered[4] == 0xffffffff);
        if (fired) {
            lookup->known_txn = 42;
            CHECK(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) == KVFS_MOVED && w->txn == 43);
            lookup->known_txn = 0;
        }
        hook_at = 0;
        mend();
    }
    for (uint64_t at = 2, fired = 1; fired; at++) { /* two: pages may be something else by now, rubbish for example */
        uint8_t there[CHUNKS], out[8 * 256], name[34] = {0};
        uint64_t txn = 0;
        memcpy(name, prefix, 32);
        for (int how = 0; how < 3; how++) {
            CHECK(!kvfs_index_open(index, fd, stamp));
            hook_at = at, hook_txn = 44, hook_rubbish = 1;
            int64_t rc = how == 0   ? kvfs_walk(index, lookup, 0, RUNS, 256, 1, w)
                         : how == 1 ? kvfs_there(index, lookup, 0, RUN, RUNS, there)
                                    : kvfs_parts(index, name, 34, out, 256, &txn);
            if (how == 0) fired = !hook_at;
            CHECK(hook_at ? rc >= 0 : rc == KVFS_MOVED);
            hook_at = hook_rubbish = 0;
            mend();
        }
    }
    CHECK(!kvfs_index_open(index, fd, stamp));
}

static void check_walks(kvfs_index *index, kvfs_lookup *lookup, kvfs_walked *w) {
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
    lookup->known_txn = 0;
    int child = fork(); /* in a child nothing is touched */
    if (!child) _exit(kvfs_walk(index, lookup, 0, RUNS, 256, 1, w) != -ESTALE);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void look(kvfs_index *index, const kvfs_lookup *lookup, kvfs_walked *w, int64_t outcomes[2]) {
    uint8_t there[32], out[8 * 256], name[34] = {0};
    uint64_t txn = 0;
    for (uint64_t run = 0; run < RUNS;) {
        int64_t rc = kvfs_walk(index, lookup, run, RUNS, 256, (int)(draw() & 1), w);
        outcomes[!!rc]++;
        if (rc) break;
        CHECK(w->end > run && w->end <= RUNS && w->n_rows <= KVFS_ROWS_MAX);
        uint64_t pages = 0, joined = kvfs_stretches(rows_found, w->n_rows, w->values, 0, stretches, roots);
        for (uint64_t i = 0; i < joined; i++) pages += stretches[i].pages;
        CHECK(joined <= pages && pages <= w->n_rows);
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
    kvfs_descriptors fd = {current, make_file(folder, "index/data.mdb", image, image_pages * PAGE)};
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
        check_walks(index, &lookup, &w);
        check_commits(index, &fd, &stamp, &lookup, &w);
        lookup.n_parts = 2;
        lookup.cells = &cell;
        cell = 3;
        check_damages(index, &fd, &stamp, &lookup, &w);
        mend();
        CHECK(!kvfs_index_open(index, &fd, &stamp));
        CHECK(!kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w));
        kvfs_index_close(index);
        CHECK(kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w) == -ESTALE);
        stamp.ctime_ns++;
        CHECK(kvfs_index_open(index, &fd, &stamp) == -ESTALE);
        stamp.ctime_ns--;
        char other[4096];
        CHECK(!kvfs_index_open(index, &fd, &stamp));
        CHECK(!kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w));
        close(make_file(folder, "index/new", "0123456789abcdef", 16)); /* another generation */
        strcpy(other, in(folder, "index/new"));
        CHECK(!rename(other, in(folder, "index/CURRENT")));
        CHECK(kvfs_walk(index, &lookup, 0, RUNS, 256, 1, &w) == -ESTALE);
    }
    free(index);
    free(w.values);
    free(image);
    close(fd.file);
    close(fd.data);
}

/* -- payloads ---------------------------------------------------------------------------------------------------------- */

static void check_long_leaf(const char *folder) {
    enum { LEAF = (1 << 20) + 40 };
    uint8_t *data = malloc(LEAF), *memory = malloc(LEAF), left[1] = {0};
    fill(data, LEAF);
    int fd = make_file(folder, "long", (const char *)data, LEAF);
    kvfs_job job = {fd, 0, 0, 0, LEAF, LEAF, 0, 0};
    uint64_t table = 0, next = 0;
    int64_t got = kvfs_read(&job, 1, 1, LEAF, memory, &table, &next, left, 1);
    if (got < 0 || left[0]) printf("reads left out: %lld\n", (long long)got);
    else CHECK(got == 1 && !memcmp(memory, data, LEAF) && table == kvfs_xxh3_64(data, LEAF, 0));
    free(data);
    free(memory);
    close(fd);
}

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
    check_long_leaf(folder);
    /* a stream of both jobs, the second half of it first in the file, a stretch in the middle left out */
    int to = make_file(folder, "copy", "", 0);
    kvfs_spot places[3] = {{150000, N - 150000, 0}, {0, 100, N}, {100, 102300, N + 100}};
    jobs[0] = (kvfs_job){fd, 0, 4096, 0, 102400, LEAF, 0, 0};
    jobs[1] = (kvfs_job){fd, 0, 4096 + 102400, 102400, N - 102400, LEAF, 25, 13};
    memset(table, 0, sizeof table);
    next = 0;
    for (int64_t copied = 0, now; copied < 38; copied += now) {
        now = kvfs_copy(jobs, 2, 38, 8192, memory, table, &next, places, 3, to, 7);
        CHECK(now > 0 && now <= 7);
    }
    CHECK(kvfs_copy(jobs, 2, 38, 8192, memory, table, &next, places, 3, to, 7) == 0);
    CHECK(!memcmp(expected, table, 8 * 74));
    CHECK(pread(to, memory, N - 150000, 0) == N - 150000 && !memcmp(memory, data + 150000, N - 150000));
    CHECK(pread(to, memory, N, N) == 102400 && !memcmp(memory, data, 102400));
    next = 0;
    CHECK(kvfs_copy(jobs, 2, 38, 8192, memory, table, &next, places, 3, -1, 7) == -EBADF && next == 38);
    jobs[1].offset += 1 << 20; /* behind the end of the file */
    next = 0;
    CHECK(kvfs_copy(jobs, 2, 38, 8192, memory, table, &next, places, 3, to, 100) == -EIO && next == 38);
    close(to);
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

/* Pages of two granules of 16 states, 2 layers, 3 heads, cells of 5 bytes of which a buffer has 3; units of 24 states,
 * of which the second is missing. What is copied out and back is the same, and nothing else is touched. */
static void check_cells(void) {
    enum { LAYERS = 2, HEADS = 3, CELL = 5, HAS = 3, UNIT = 24, UNITS = 4, PAGE = 32 * LAYERS * HEADS * CELL };
    uint8_t buffer[LAYERS][UNITS][HEADS][UNIT][HAS], before[sizeof buffer], pages[2][PAGE], again[2][PAGE];
    fill(buffer[0][0][0][0], sizeof buffer);
    memcpy(before, buffer, sizeof buffer);
    memset(pages, 0xa5, sizeof pages);
    kvfs_shape shape = {32, 16, UNIT, LAYERS, HEADS, HEADS, CELL, HAS, 1, 7, 0, HEADS * UNIT * HAS, HAS, UNIT * HAS};
    kvfs_layer layers[LAYERS] = {{0, buffer[0][0][0][0]}, {1, buffer[1][0][0][0]}};
    kvfs_page places[2] = {{pages[0], 0}, {pages[1], 32}};
    int64_t units[3] = {2, -1, 0};
    kvfs_cells(&shape, layers, LAYERS, places, 2, units, 1);
    CHECK(!memcmp(before, buffer, sizeof buffer));
    for (int state = 0; state < 64; state++)
        for (int layer = 0; layer < LAYERS; layer++)
            for (int head = 0; head < HEADS; head++)
                for (int byte = 0; byte < CELL; byte++) {
                    int row = ((state % 32 / 16 * LAYERS + layer) * HEADS + head) * 16 + state % 16;
                    int64_t unit = units[state / UNIT];
                    int there = state >= 7 && unit >= 0 && byte >= 1 && byte < 1 + HAS;
                    uint8_t want = there ? buffer[layer][unit][head][state % UNIT][byte - 1] : 0xa5;
                    CHECK(pages[state / 32][row * CELL + byte] == want);
                }
    memset(buffer, 0, sizeof buffer);
    kvfs_cells(&shape, layers, LAYERS, places, 2, units, 0);
    memset(again, 0xa5, sizeof again);
    places[0].memory = again[0], places[1].memory = again[1];
    kvfs_cells(&shape, layers, LAYERS, places, 2, units, 1);
    CHECK(!memcmp(pages, again, sizeof pages));
}

/* Pages of two loads, copied to one buffer each; then with a wrong root, and with a file that has no such bytes. */
static void check_loads(const char *folder) {
    enum { STATES = 16, CELL = 33, PAGE_BYTES = STATES * CELL, STEP = 600, UNIT = 8, N = 5 };
    uint8_t data[N * STEP], roots[16 * N], table[8 * 9], want[2][N * STATES][CELL], buffer[2][N * STATES][CELL];
    fill(data, sizeof data);
    int fd = make_file(folder, "pages", data, sizeof data);
    uint8_t *memory = malloc(PAGE_BYTES + sizeof table); /* exactly what is asked for */
    kvfs_shape shape = {STATES, STATES, UNIT, 1, 1, 1, CELL, CELL, 0, 3, 0, UNIT * CELL, CELL, 0};
    kvfs_layer layers[2] = {{0, buffer[0][0]}, {0, buffer[1][0]}};
    kvfs_target targets[2] = {{shape, &layers[0], 1}, {shape, &layers[1], 1}};
    int64_t units[2 * N];
    for (int i = 0; i < 2 * N; i++) units[i] = i == 4 ? -1 : 2 * N - 1 - i;
    memset(want, 0xa5, sizeof want);
    for (int page = 0; page < N; page++) {
        kvfs_sum(data + page * STEP, PAGE_BYTES, 64, table);
        kvfs_roots(table, 1, sizeof table, roots + 16 * page);
        for (int state = page * STATES; state < (page + 1) * STATES; state++)
            if (state >= 3 && units[state / UNIT] >= 0)
                memcpy(want[page >= 2][units[state / UNIT] * UNIT + state % UNIT], data + page * STEP + state % STATES * CELL, CELL);
    }
    kvfs_load_run runs[2] = {
        {fd, 0, 0, STEP, PAGE_BYTES, 64, 0, 0, units, &targets[0], 1},
        {fd, 1, 2 * STEP, STEP, PAGE_BYTES, 64, 2, 2 * STATES, units, &targets[1], 1}};
    uint32_t left[2] = {2, 3};
    uint64_t next = 0;
    memset(buffer, 0xa5, sizeof buffer);
    int64_t got = kvfs_load(runs, 2, roots, N, memory, &next, left, 2);
    if (got == 2) {
        CHECK(left[0] == 0 && left[1] == 3 && next == 2);
        CHECK(kvfs_load(runs, 2, roots, N, memory, &next, left, 100) == 3 && !left[1]);
        CHECK(!memcmp(buffer, want, sizeof want));
        CHECK(kvfs_load(runs, 2, roots, N, memory, &next, left, 100) == 0);
        roots[16 * 3] ^= 1; /* the second of three: the first was copied, the third is not tried */
        left[0] = 2, left[1] = 3, next = 0;
        memset(buffer, 0xa5, sizeof buffer);
        CHECK(kvfs_load(runs, 2, roots, N, memory, &next, left, 100) == 3);
        CHECK(!left[0] && left[1] == (KVFS_LOAD_FAILED | 2) && !memcmp(buffer[0], want[0], sizeof want[0]));
        CHECK(buffer[1][0][0] == 0xa5);
        runs[1].leaf = 0, left[0] = 2, left[1] = 3, next = 0; /* not verified */
        CHECK(kvfs_load(runs, 2, roots, N, memory, &next, left, 100) == 5 && !memcmp(buffer, want, sizeof want));
        runs[0].offset = 1 << 20, left[0] = 2, left[1] = 3, next = 0;
        CHECK(kvfs_load(runs, 2, roots, N, memory, &next, left, 100) == 3 && left[0] == (KVFS_LOAD_FAILED | 2));
    } else {
        printf("loads left out: %lld\n", (long long)got);
        CHECK(left[0] && left[1]);
    }
    close(fd);
    free(memory);
}

#include "ranks.h"

int main(int argc, char **argv) {
    CHECK(argc == 2 && kvfs_abi() == KVFS_ABI);
    printf("features %u\n", kvfs_features());
    check_hashes();
    make_index();
    check_lookups(argv[1]);
    check_payloads(argv[1]);
    check_cells();
    check_loads(argv[1]);
    check_ranks();
    puts("ok");
    return 0;
}
