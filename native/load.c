/* Loads to an engine's buffers in one call: pages are read, verified and copied one by one, without the interpreter. */
#define _GNU_SOURCE
#include <string.h>

#include "hash.h"
#include "kvfs_native.h"
#include "now.h"

/* The run that has a page. */
static const kvfs_load_run *run_of(const kvfs_load_run *runs, uint64_t n, uint64_t page) {
    uint64_t low = 0, high = n;
    while (high - low > 1) {
        uint64_t middle = (low + high) / 2;
        if (runs[middle].page <= page) low = middle;
        else high = middle;
    }
    return runs + low;
}

/* Reads page i of a run into memory; -EBADMSG: its root is another. Leaf sums are behind the page. */
static int64_t read_page(const kvfs_load_run *run, uint64_t i, const uint8_t *root, uint8_t *memory, uint32_t *plain) {
    int64_t rc = read_now(run->fd, memory, run->nbytes, (uint64_t)run->offset + i * run->stride, plain);
    if (rc || !run->leaf) return rc;
    uint8_t *table = memory + run->nbytes, found[16];
    kvfs_sum(memory, run->nbytes, run->leaf, table);
    kvfs_xxh3_128(table, 8 * ((run->nbytes + run->leaf - 1) / run->leaf), found);
    return memcmp(found, root, sizeof found) ? -EBADMSG : 0;
}

int64_t kvfs_load(
    const kvfs_load_run *runs, uint64_t n_runs, const uint8_t *roots, uint64_t n_pages, uint8_t *memory,
    uint64_t *next, uint32_t *left, uint64_t most) {
    int64_t mine = 0;
    uint32_t plain = 0;
    for (; most; most--) {
        const uint64_t page = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (page >= n_pages) break;
        const kvfs_load_run *run = run_of(runs, n_runs, page);
        if (__atomic_load_n(&left[run->load], __ATOMIC_RELAXED) & KVFS_LOAD_FAILED) continue;
        const int64_t rc = read_page(run, page - run->page, roots + 16 * page, memory, &plain);
        if (rc) {
            __atomic_fetch_or(&left[run->load], KVFS_LOAD_FAILED, __ATOMIC_RELAXED);
            if (rc == -ENOTSUP) return rc;
            continue;
        }
        for (const kvfs_target *t = run->targets; t < run->targets + run->n_targets; t++) {
            const kvfs_page one = {memory, run->state + (page - run->page) * t->shape.states};
            kvfs_cells(&t->shape, t->layers, t->n_layers, &one, 1, run->units, 0);
        }
        __atomic_fetch_sub(&left[run->load], 1, __ATOMIC_RELAXED);
        mine++;
    }
    return mine;
}
