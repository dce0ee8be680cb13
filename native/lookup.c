/* The walk along a prompt: kvfs.lookup.search.GroupLookup in one call. */
#include <errno.h>

#include "index.h"

enum { KEY = 40, ROW_HEAD = 20, EXTENT = 32, HASH = 32, ROOT = 16, RUN = 32 };
enum { CLAIM = 1, CLAIM_SECONDS = 5, CODECS = 3, ACTIVE = 1, DROPPED = 3, SEGMENT_ROW = 92 };

typedef struct {
    kvfs_index *index;
    const kvfs_lookup *lookup;
    kvfs_walked *walked;
    uint64_t used; /* bytes of values */
    uint8_t named[KVFS_PREFIX_MAX + HASH];
} walk;

static void make_key(walk *w, uint64_t chunk, uint64_t part, uint8_t key[KEY]) {
    const kvfs_lookup *l = w->lookup;
    memcpy(w->named + l->prefix_bytes, l->hashes + HASH * chunk, HASH);
    kvfs_blake2b(w->named, l->prefix_bytes + HASH, key);
    memcpy(key + 32, l->parts + 8 * part, 8);
}

static int64_t begin(walk *w, kvfs_index *index, const kvfs_lookup *lookup) {
    if (lookup->prefix_bytes > KVFS_PREFIX_MAX || !lookup->n_parts || lookup->n_parts > KVFS_PARTS_MAX) return -E2BIG;
    if (!lookup->n_cells || lookup->n_cells > KVFS_CELLS_MAX) return -E2BIG;
    w->index = index;
    w->lookup = lookup;
    memcpy(w->named, lookup->prefix, lookup->prefix_bytes);
    return index_begin(index);
}

/* -- segments -------------------------------------------------------------------------------------------------- */

/* kvfs.index.tables.get_segment; remembered until the next commit. */
static int64_t get_segment(kvfs_index *x, uint32_t number, memo **found) {
    memo *m = *found = &x->memos[number % MEMO];
    if (m->txn == x->txn && m->number == number) return 0;
    uint8_t key[4] = {(uint8_t)(number >> 24), (uint8_t)(number >> 16), (uint8_t)(number >> 8), (uint8_t)number};
    uint8_t row[SEGMENT_ROW + 8];
    int64_t n = tree_get(x, &x->tables[SEGMENTS_TABLE], key, 4, row, sizeof row);
    if (n < 0 && n != -ENOENT && n != -E2BIG) return n;
    int fine = n == SEGMENT_ROW + 8 && kvfs_xxh3_64(row, SEGMENT_ROW, 0) == load64(row + SEGMENT_ROW);
    *m = (memo){.txn = x->txn, .number = number, .state = fine ? load32(row + 48) : 0};
    if (fine) {
        m->tail = load64(row + 72);
        memcpy(m->id, row, 16);
    }
    return 0;
}

static int64_t report(walk *w, memo *m) {
    kvfs_walked *out = w->walked;
    if (m->call == w->index->calls) return 0;
    if (out->n_segments == KVFS_SEGMENTS_MAX) return -E2BIG;
    kvfs_segment *s = &out->segments[out->n_segments++];
    *s = (kvfs_segment){.number = m->number, .tail = m->tail};
    memcpy(s->id, m->id, 16);
    m->call = w->index->calls;
    return 0;
}

/* -- rows -------------------------------------------------------------------------------------------------------- */

/* kvfs.index.rows.parse_row: whether a value is a row. */
static int is_row(const uint8_t *key, const uint8_t *p, uint64_t n) {
    if (n < ROW_HEAD || load64(p) != kvfs_xxh3_64(p + 8, n - 8, load64(key)) || p[8] != 1 || load16(p + 10)) return 0;
    unsigned extents = p[9], end = 0;
    uint32_t present = load32(p + 12), covered = 0;
    uint64_t leaves = load32(p + 16);
    if (n != ROW_HEAD + (uint64_t)EXTENT * extents + (uint64_t)(HASH + ROOT) * (unsigned)__builtin_popcount(present))
        return 0;
    for (unsigned i = 0; i < extents; i++) {
        const uint8_t *e = p + ROW_HEAD + EXTENT * i;
        unsigned first = e[0], chunks = e[1];
        if (!chunks || first < end || first + chunks > RUN) return 0;
        end = first + chunks;
        covered |= (uint32_t)(((1ull << chunks) - 1) << first);
        uint64_t block = load32(e + 8), stride = load32(e + 12), leaf = load32(e + 20), seq = load32(e + 24);
        uint64_t last = chunks - 1;
        if (e[3] & CLAIM) {
            if (e[2] | block | stride | load32(e + 16) | leaf | seq) return 0;
        } else if ((block + last * stride) >> 32 || (leaf + last * leaves) >> 32 || (seq + last) >> 32) {
            return 0;
        }
    }
    return covered == present;
}

int kvfs_is_row(const uint8_t *key, const uint8_t *value, uint64_t nbytes) { return is_row(key, value, nbytes); }

/* Row.matches */
static uint32_t matches(const uint8_t *p, const uint8_t *wanted, unsigned count) {
    uint32_t present = load32(p + 12), found = 0;
    const uint8_t *hash = p + ROW_HEAD + EXTENT * p[9];
    for (unsigned j = 0; j < count; j++) {
        if (!(present >> j & 1)) continue;
        if (!memcmp(hash, wanted + HASH * j, HASH)) found |= 1u << j;
        hash += HASH;
    }
    return found;
}

/* GroupLookup._judge: chunks of ``matched`` that may be read, and those that are being written. */
static int64_t judge(walk *w, const uint8_t *p, uint32_t matched, uint32_t *live, uint32_t *claimed) {
    uint64_t now = w->lookup->now_s;
    *live = *claimed = 0;
    for (unsigned i = 0; i < p[9]; i++) {
        const uint8_t *e = p + ROW_HEAD + EXTENT * i;
        uint32_t bits = (uint32_t)(((1ull << e[1]) - 1) << e[0]) & matched, expires = load32(e + 28);
        int claim = e[3] & CLAIM;
        if (!bits || e[2] >= CODECS) continue;
        if (claim ? !(now < expires && expires <= now + CLAIM_SECONDS) : expires && expires <= now) continue;
        memo *m;
        int64_t rc = get_segment(w->index, load32(e + 4), &m);
        if (rc) return rc;
        if (claim) {
            if (m->state == ACTIVE) *claimed |= bits;
        } else if (m->state && m->state != DROPPED) {
            if ((rc = report(w, m))) return rc;
            *live |= bits;
        }
    }
    return 0;
}

/* GroupLookup._read_rows: live and claimed chunks of one part in the rows of a run; follows forks. */
static int64_t read_rows(
    walk *w, uint64_t run, uint64_t part, unsigned count, int stop_at_gap, uint32_t *live_out, uint32_t *claimed_out) {
    const kvfs_lookup *l = w->lookup;
    kvfs_walked *out = w->walked;
    uint64_t first = run * l->run_length;
    uint32_t live = 0, claimed = 0, seen = 0, left, unread = (uint32_t)((1ull << count) - 1);
    while ((left = unread & ~seen)) {
        unsigned j = (unsigned)__builtin_ctz(left);
        unread &= j == 31 ? 0 : ~0u << (j + 1);
        uint8_t key[KEY], *value = out->values + w->used;
        make_key(w, first + j, part, key);
        if (++out->rows_read > KVFS_KEYS_MAX) return -E2BIG;
        int64_t n = tree_get(w->index, &w->index->tables[PAGES_TABLE], key, KEY, value, out->values_bytes - w->used);
        if (n < 0 && n != -ENOENT) return n;
        if (n > 0 && is_row(key, value, (uint64_t)n)) {
            uint32_t new_live, new_claimed, matched = matches(value, l->hashes + HASH * first, count);
            int64_t rc = judge(w, value, matched & ~live, &new_live, &new_claimed);
            if (rc) return rc;
            if (new_live) {
                if (out->n_rows == KVFS_ROWS_MAX) return -E2BIG;
                kvfs_row *row = &out->rows[out->n_rows++];
                *row = (kvfs_row){(uint32_t)run, (uint32_t)part, new_live, (uint32_t)n, w->used, {0}};
                memcpy(row->key, key, KEY);
                w->used += (uint64_t)n;
            }
            live |= new_live;
            claimed |= new_claimed & ~live;
            seen |= live | claimed;
        }
        if (!(seen >> j & 1) && stop_at_gap) break;
    }
    *live_out = live;
    *claimed_out |= claimed;
    return 0;
}

/* GroupLookup._cover: chunks whose every elementary rectangle is in some live part. */
static uint32_t cover(const kvfs_lookup *l, const uint32_t *live, uint64_t parts, uint32_t whole) {
    if (l->first_is_enough && live[0] == whole) return whole;
    uint32_t covered = whole;
    for (uint64_t c = 0; c < l->n_cells; c++) {
        uint32_t either = 0;
        for (uint64_t p = 0; p < parts; p++)
            if (l->cells[c] >> p & 1) either |= live[p];
        covered &= either;
    }
    return covered;
}

static int64_t read_run(walk *w, uint64_t run, int stop_at_gap, uint32_t *covered, uint32_t *claimed, uint32_t *whole) {
    const kvfs_lookup *l = w->lookup;
    uint64_t left = l->chunks - run * l->run_length;
    unsigned count = (unsigned)(left < l->run_length ? left : l->run_length);
    uint32_t live[KVFS_PARTS_MAX];
    *whole = (uint32_t)((1ull << count) - 1);
    *covered = *claimed = 0;
    for (uint64_t part = 0; part < l->n_parts && *covered != *whole; part++) {
        int64_t rc = read_rows(w, run, part, count, stop_at_gap, &live[part], claimed);
        if (rc) return rc;
        *covered = cover(l, live, part + 1, *whole);
    }
    return 0;
}

int64_t kvfs_walk(
    kvfs_index *index, const kvfs_lookup *lookup, uint64_t first, uint64_t end, uint64_t rows_max, int stop_at_gap,
    kvfs_walked *walked) {
    walk w = {.walked = walked};
    walked->txn = 0;
    if (lookup->run_length < 1 || lookup->run_length > RUN || end - first > KVFS_RUNS_MAX) return -E2BIG;
    int64_t rc = begin(&w, index, lookup);
    if (rc) return rc;
    walked->txn = index->txn;
    if (lookup->known_txn && lookup->known_txn != index->txn) return index_end(index, KVFS_MOVED);
    walked->n_rows = walked->n_segments = walked->rows_read = 0;
    uint64_t run = first;
    while (run < end && (run == first || walked->rows_read < rows_max)) {
        uint64_t rows = walked->n_rows;
        uint32_t whole, *covered = &walked->covered[run - first];
        if ((rc = read_run(&w, run, stop_at_gap, covered, &walked->claimed[run - first], &whole))) {
            if (rc == -E2BIG && run > first) { /* the next call begins with it */
                walked->n_rows = rows;
                rc = 0;
            }
            break;
        }
        run++;
        if (*covered != whole) break;
    }
    walked->end = run;
    walked->n_values = w.used;
    if ((rc = index_end(index, rc)) == KVFS_MOVED) walked->txn = 0;
    return rc;
}

int64_t kvfs_there(
    kvfs_index *index, const kvfs_lookup *lookup, uint64_t first, uint64_t stride, uint64_t count, uint8_t *there) {
    walk w;
    if (count > KVFS_KEYS_MAX || count * lookup->n_parts > KVFS_KEYS_MAX) return -E2BIG;
    int64_t rc = begin(&w, index, lookup);
    if (rc) return rc;
    for (uint64_t i = 0; i < count && !rc; i++) {
        there[i] = 0;
        for (uint64_t part = 0; part < lookup->n_parts && !there[i] && !rc; part++) {
            uint8_t key[KEY];
            make_key(&w, first + i * stride, part, key);
            int64_t found = tree_get(index, &index->tables[PAGES_TABLE], key, KEY, NULL, 0);
            if (!found) there[i] = 1;
            else if (found != -ENOENT) rc = found;
        }
    }
    return index_end(index, rc);
}

int64_t kvfs_parts(
    kvfs_index *index, const uint8_t *prefix, uint64_t prefix_bytes, uint8_t *out, uint64_t parts_max, uint64_t *txn) {
    uint8_t key[512];
    if (prefix_bytes > 256) return -E2BIG;
    int64_t rc = index_begin(index);
    if (rc) return rc;
    *txn = index->txn;
    int64_t parts = 0, n = 0;
    memcpy(key, prefix, prefix_bytes);
    for (uint64_t size = prefix_bytes, read = 0; read < parts_max; read++) {
        n = tree_seek(index, &index->tables[NAMESPACES_TABLE], key, (unsigned)size, key);
        if (n < (int64_t)prefix_bytes || memcmp(key, prefix, prefix_bytes)) break;
        if (n == (int64_t)prefix_bytes + 8) memcpy(out + 8 * parts++, key + prefix_bytes, 8);
        size = (uint64_t)n;
        if (size == 511) break; /* no key can follow with a zero behind it: LMDB's keys end here */
        key[size++] = 0;
    }
    return index_end(index, n < 0 && n != -ENOENT ? n : parts);
}

/* -- pages of keys ------------------------------------------------------------------------------------------------ */

/* Whether a page continues a stretch; its first two pages say how far apart all of them are. */
static int continues(const kvfs_stretch *s, const kvfs_stretch *page) {
    uint64_t step = s->pages == 1 ? page->block - s->block : s->step;
    return page->chunk == s->chunk + s->pages && page->segment == s->segment && page->codec == s->codec &&
           page->stored == s->stored && page->leaves == s->leaves && page->seq == (uint64_t)s->seq + s->pages &&
           page->block > s->block && step <= UINT32_MAX && page->block == s->block + s->pages * step &&
           page->leaf == (s->leaf ? s->leaf + (uint64_t)s->pages * s->leaves : 0);
}

uint64_t kvfs_stretches(
    const kvfs_row *rows, uint64_t n_rows, const uint8_t *values, uint32_t part, kvfs_stretch *out, uint8_t *roots) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < n_rows; i++) {
        if (rows[i].part != part || !(rows[i].bits & 1)) continue;
        const uint8_t *p = values + rows[i].at, *e = p + ROW_HEAD; /* chunk 0 is in the first extent */
        kvfs_stretch page = {rows[i].run, 1, load32(e + 4), e[2], load32(e + 16), load32(p + 16), load32(e + 24), 0,
                             load32(e + 8), load32(e + 20)};
        memcpy(roots, e + EXTENT * p[9] + HASH * (unsigned)__builtin_popcount(load32(p + 12)), ROOT);
        roots += ROOT;
        kvfs_stretch *last = n ? &out[n - 1] : NULL;
        if (last && continues(last, &page)) {
            if (last->pages++ == 1) last->step = (uint32_t)(page.block - last->block);
        } else {
            out[n++] = page;
        }
    }
    return n;
}
