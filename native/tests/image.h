/* An index of LMDB made by hand, page by page, for the tests in C. The comparison with LMDB itself is in tests/native. */
#ifndef KVFS_IMAGE_H
#define KVFS_IMAGE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvfs_native.h"

#define CHECK(what)                                                     \
    do {                                                                \
        if (!(what)) {                                                  \
            fprintf(stderr, "line %d: %s is false\n", __LINE__, #what); \
            exit(1);                                                    \
        }                                                               \
    } while (0)

enum { PAGE = 4096, RUN = 32, CHUNKS = 300, RUNS = 10, FILLERS = 900, PARTS = 70, NOW = 1000000 };

static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}
static void fill(uint8_t *p, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) p[i] = (uint8_t)draw();
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

#endif
