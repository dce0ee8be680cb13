/* Payloads: read out of the page cache and summed, and written, without the interpreter. */
#define _GNU_SOURCE
#include "hash.h"
#include "kvfs_native.h"
#include "now.h"

enum {
    SPANS = 512,
    CHUNK = 512 << 10 /* of a long leaf: read and summed at once, so that the sum finds it in the core's cache */
};

void kvfs_sum(const uint8_t *data, uint64_t nbytes, uint64_t leaf, uint8_t *table) {
    for (uint64_t at = 0; at < nbytes; at += leaf, table += 8) {
        uint64_t sum = kvfs_xxh3_64(data + at, nbytes - at < leaf ? nbytes - at : leaf, 0);
        memcpy(table, &sum, 8);
    }
}

void kvfs_roots(const uint8_t *tables, uint64_t count, uint64_t nbytes, uint8_t *out) {
    for (uint64_t i = 0; i < count; i++) kvfs_xxh3_128(tables + i * nbytes, nbytes, out + 16 * i);
}

void kvfs_sum_records(const kvfs_record *records, uint64_t count) {
    for (const kvfs_record *r = records; r < records + count; r++) {
        if (r->leaf) kvfs_sum(r->payload, r->nbytes, r->leaf, r->table);
        kvfs_xxh3_128(r->table, r->table_bytes, r->root);
    }
}

/* The job that has a piece. */
static uint64_t job_of(const kvfs_job *jobs, uint64_t n, uint64_t piece) {
    uint64_t low = 0, high = n;
    while (high - low > 1) {
        uint64_t middle = (low + high) / 2;
        if (jobs[middle].piece <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Reads a leaf that is longer than a chunk, and sums it. rc as of read_now. */
static int64_t read_long_leaf(
    int fd, uint8_t *to, uint64_t nbytes, uint64_t offset, uint8_t *table, uint32_t *plain) {
    kvfs_lanes acc;
    uint64_t at = 0;
    kvfs_xxh3_begin(&acc);
    for (; nbytes - at > CHUNK; at += CHUNK) {
        int64_t rc = read_now(fd, to + at, CHUNK, offset + at, plain);
        if (rc) return rc;
        kvfs_xxh3_more(&acc, to + at, CHUNK);
    }
    int64_t rc = read_now(fd, to + at, nbytes - at, offset + at, plain);
    if (rc) return rc;
    uint64_t sum = kvfs_xxh3_end(&acc, to + at, nbytes - at, nbytes);
    memcpy(table, &sum, 8);
    return 0;
}

/* Reads a piece and sums its leaves, if they are of any length. rc as of read_now. */
static int64_t read_piece(
    const kvfs_job *job, uint8_t *to, uint64_t nbytes, uint64_t offset, uint8_t *table, uint32_t *plain) {
    if (job->leaf > CHUNK && nbytes == job->leaf) return read_long_leaf(job->fd, to, nbytes, offset, table, plain);
    int64_t rc = read_now(job->fd, to, nbytes, offset, plain);
    if (!rc && job->leaf) kvfs_sum(to, nbytes, job->leaf, table);
    return rc;
}

int64_t kvfs_read(
    const kvfs_job *jobs, uint64_t n_jobs, uint64_t n_pieces, uint64_t step, uint8_t *memory, uint64_t *table,
    uint64_t *next, uint8_t *left, uint64_t most) {
    int64_t mine = 0;
    uint32_t plain = 0;
    for (; most; most--) {
        uint64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (piece >= n_pieces) break;
        uint64_t number = job_of(jobs, n_jobs, piece);
        const kvfs_job *job = &jobs[number];
        if (__atomic_load_n(&left[number], __ATOMIC_RELAXED)) continue;
        uint64_t at = (piece - job->piece) * step, nbytes = job->nbytes - at < step ? job->nbytes - at : step;
        uint8_t *sums = (uint8_t *)(table + job->table + (job->leaf ? at / job->leaf : 0));
        int64_t rc = read_piece(job, memory + job->at + at, nbytes, (uint64_t)job->offset + at, sums, &plain);
        if (rc) {
            __atomic_store_n(&left[number], 1, __ATOMIC_RELAXED);
            if (rc == -ENOTSUP) return rc;
            continue;
        }
        mine++;
    }
    return mine;
}

static int64_t read_all(int fd, uint8_t *to, uint64_t nbytes, uint64_t offset) {
    while (nbytes) {
        ssize_t got = pread(fd, to, nbytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? -errno : -EIO;
        to += got, offset += (uint64_t)got, nbytes -= (uint64_t)got;
    }
    return 0;
}

/* Bytes [from, from + nbytes) of a stream, to where the file has them. */
static int64_t write_spots(
    int fd, const kvfs_spot *spots, uint64_t count, const uint8_t *data, uint64_t from, uint64_t nbytes) {
    for (const kvfs_spot *s = spots; s < spots + count; s++) {
        uint64_t at = s->at > from ? s->at : from, end = s->at + s->nbytes;
        if (end > from + nbytes) end = from + nbytes;
        while (at < end) {
            ssize_t wrote = pwrite(fd, data + (at - from), end - at, s->offset + (int64_t)(at - s->at));
            if (wrote < 0 && errno == EINTR) continue;
            if (wrote <= 0) return wrote ? -errno : -EIO;
            at += (uint64_t)wrote;
        }
    }
    return 0;
}

int64_t kvfs_copy(
    const kvfs_job *jobs, uint64_t n_jobs, uint64_t n_pieces, uint64_t step, uint8_t *memory, uint64_t *table,
    uint64_t *next, const kvfs_spot *spots, uint64_t n_spots, int to, uint64_t most) {
    int64_t mine = 0;
    for (; most; most--, mine++) {
        uint64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (piece >= n_pieces) break;
        const kvfs_job *job = &jobs[job_of(jobs, n_jobs, piece)];
        uint64_t at = (piece - job->piece) * step, nbytes = job->nbytes - at < step ? job->nbytes - at : step;
        int64_t rc = read_all(job->fd, memory, nbytes, (uint64_t)job->offset + at);
        if (!rc) {
            kvfs_sum(memory, nbytes, job->leaf, (uint8_t *)(table + job->table + at / job->leaf));
            rc = write_spots(to, spots, n_spots, memory, job->at + at, nbytes);
        }
        if (rc) {
            __atomic_store_n(next, n_pieces, __ATOMIC_RELAXED); /* the other threads end */
            return rc;
        }
    }
    return mine;
}

int64_t kvfs_write(int fd, const kvfs_span *spans, uint64_t count, int64_t offset, uint64_t from, uint64_t most) {
    uint64_t done = 0, at = 0; /* at: of the first span that is not written */
    while (count && at + spans->nbytes <= from) at += spans++->nbytes, count--;
    while (count && done < most) {
        struct iovec some[SPANS];
        uint64_t total = 0, skip = from + done - at, room = most - done;
        int n = 0;
        for (uint64_t i = 0; i < count && n < SPANS && total < room; i++) {
            uint64_t size = spans[i].nbytes - (i ? 0 : skip);
            size = size < room - total ? size : room - total;
            some[n++] = (struct iovec){(void *)(uintptr_t)(spans[i].data + (i ? 0 : skip)), size};
            total += size;
        }
        ssize_t wrote = pwritev(fd, some, n, offset + (int64_t)(from + done));
        if (wrote < 0 && errno == EINTR) break;
        if (wrote <= 0) return wrote ? -errno : -EIO;
        done += (uint64_t)wrote;
        while (count && at + spans->nbytes <= from + done) at += spans++->nbytes, count--;
    }
    return (int64_t)(from + done);
}

int64_t kvfs_append(
    const kvfs_record *records, uint64_t n_records, int fd, const kvfs_span *spans, uint64_t count, int64_t offset,
    uint64_t most) {
    kvfs_sum_records(records, n_records);
    return kvfs_write(fd, spans, count, offset, 0, most);
}
