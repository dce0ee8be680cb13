/* Looks up in an index that was damaged, again and again: fuzz SEED EXECUTIONS. Run under sanitizers.
 *
 * Each execution damages a few places of an index in memory and makes one call. Half of the damaged rows get a right
 * checksum, as a writer with a fault would leave them. A call may answer or refuse; what it answers must be inside the
 * buffers, and verify. Damages stay for some executions, so that several add up. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "image.h"

enum { SPOTS = 8, KEEP = 6, NODES = 4096 };

static uint8_t *now; /* the damaged image */
static uint64_t now_bytes;

int64_t kvfs_read_hook(uint8_t *to, uint64_t nbytes, uint64_t offset) {
    if (offset > now_bytes || nbytes > now_bytes - offset) return -EAGAIN;
    memcpy(to, now + offset, nbytes);
    return 0;
}

/* Rows in the leaves of the image: where they are, and how they are summed. */
typedef struct {
    uint64_t at, sum, body, nbytes, seed;
} node;
static node nodes[NODES];
static unsigned n_nodes;

static void find_nodes(void) {
    for (uint64_t page = 2; page < image_pages; page++) {
        const uint8_t *p = image + page * PAGE;
        if (get16(p + 10) != 2) continue;
        for (unsigned i = 16; i < get16(p + 12) && n_nodes < NODES; i += 2) {
            const uint8_t *e = p + get16(p + i), *value = e + 8 + get16(e + 6);
            uint64_t nbytes = get16(e) | (uint64_t)get16(e + 2) << 16, seed = 0;
            if (get16(e + 4) || (get16(e + 6) != 40 && get16(e + 6) != 4) || nbytes < 20) continue;
            uint64_t at = (uint64_t)(value - image);
            if (get16(e + 6) == 40) memcpy(&seed, e + 8, 8), nodes[n_nodes++] = (node){at, at, at + 8, nbytes - 8, seed};
            else nodes[n_nodes++] = (node){at, at + 92, at, 92, 0};
        }
    }
    CHECK(n_nodes > 20);
}

static uint64_t touched[(SPOTS + 2) * KEEP];
static unsigned n_touched;

static void put(uint64_t at, const uint8_t *bytes, uint64_t n) {
    if (at + n > image_pages * PAGE) at = image_pages * PAGE - n;
    touched[n_touched++] = at / PAGE;
    if (at / PAGE != (at + n - 1) / PAGE) n = PAGE - at % PAGE;
    memcpy(now + at, bytes, n);
}

static void damage(void) {
    uint8_t bytes[8];
    static const uint32_t edges[] = {0, 1, 2, 31, 32, 33, 127, 128, 255, 256, 4080, 4095, 4096, 65535, 0x7fffffff, 0xffffffff};
    fill(bytes, 8);
    if (draw() % 3 == 0) put64(bytes, edges[draw() % 16]);
    if (draw() % 4 == 0) put64(bytes, draw() % (image_pages + 2));
    uint64_t n = 1ull << draw() % 4;
    switch (draw() % 4) {
    case 0: { /* a row; its sum is right again */
        const node *x = &nodes[draw() % n_nodes];
        uint64_t at = draw() % (draw() % 2 && x->nbytes > 64 ? 64 : x->nbytes);
        if (at + n > x->nbytes) n = 1;
        memcpy(now + x->body + at, bytes, n);
        put64(now + x->sum, kvfs_xxh3_64(now + x->body, x->nbytes, x->seed));
        touched[n_touched++] = x->at / PAGE;
        break;
    }
    case 1: { /* the head of a page, its offsets, or the head of a node */
        uint64_t page = draw() % image_pages, at = page * PAGE;
        const uint8_t *p = now + at;
        unsigned lower = get16(p + 12), slot = lower > 16 && lower <= PAGE ? (unsigned)(16 + draw() % (lower - 16)) & ~1u : 16;
        unsigned entry = slot + 2 <= PAGE ? get16(p + slot) : 0;
        put(draw() % 3 ? at + (draw() % 2 ? slot : draw() % 16) : at + (entry < PAGE - 8 ? entry + draw() % 8 : 0), bytes, n > 2 ? 2 : n);
        break;
    }
    case 2: /* roots, branches and metas */
        put((draw() % 2 ? draw() % 2 : image_pages - 1 - draw() % 12) * PAGE + draw() % (draw() % 2 ? 160 : PAGE), bytes, n);
        break;
    default:
        put(draw() % (image_pages * PAGE), bytes, n);
    }
}

static kvfs_row *rows;
static kvfs_segment *segments;
static uint32_t covered[KVFS_RUNS_MAX], claimed[KVFS_RUNS_MAX];

static int is_refusal(int64_t rc) {
    return rc == KVFS_MOVED || rc == -EAGAIN || rc == -EIO || rc == -ENOTSUP || rc == -E2BIG;
}

static void check_answer(const kvfs_lookup *l, const kvfs_walked *w, uint64_t first) {
    CHECK(w->end > first && w->end <= RUNS && w->n_rows <= KVFS_ROWS_MAX && w->n_segments <= KVFS_SEGMENTS_MAX);
    CHECK(w->n_values <= w->values_bytes && w->rows_read <= KVFS_KEYS_MAX);
    for (uint64_t i = 0; i < w->n_rows; i++) {
        CHECK(rows[i].at + rows[i].nbytes <= w->n_values && rows[i].bits && rows[i].run >= first && rows[i].run < w->end);
        CHECK(rows[i].part < l->n_parts && kvfs_is_row(rows[i].key, w->values + rows[i].at, rows[i].nbytes));
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    state ^= strtoull(argv[1], NULL, 10) * 0x9e3779b97f4a7c15ull;
    uint64_t executions = strtoull(argv[2], NULL, 10), answers[3] = {0};
    make_index();
    find_nodes();
    now = malloc(image_pages * PAGE); /* its end is the image's: a read behind it is found */
    memcpy(now, image, image_pages * PAGE);
    rows = malloc(sizeof *rows * KVFS_ROWS_MAX);
    segments = malloc(sizeof *segments * KVFS_SEGMENTS_MAX);
    int file = open("/proc/self/exe", O_RDONLY);
    struct stat st;
    CHECK(file >= 0 && !fstat(file, &st));
    kvfs_stamp stamp = {st.st_dev, st.st_ino, st.st_mtim.tv_sec * 1000000000ll + st.st_mtim.tv_nsec,
                        st.st_ctim.tv_sec * 1000000000ll + st.st_ctim.tv_nsec};
    kvfs_descriptors fd = {file, file};
    kvfs_index *index = malloc(kvfs_index_bytes());
    CHECK(!kvfs_index_open(index, &fd, &stamp));
    uint64_t sizes[3] = {2000, 30000, 1 << 20};
    uint8_t *values[3] = {malloc(2000), malloc(30000), malloc(1 << 20)};
    for (uint64_t i = 0; i < executions; i++) {
        if (i % KEEP == 0) {
            while (n_touched) n_touched--, memcpy(now + touched[n_touched] * PAGE, image + touched[n_touched] * PAGE, PAGE);
            now_bytes = image_pages * PAGE;
            if (draw() % 64 == 0) now_bytes = draw() % now_bytes;
        }
        for (uint64_t spots = draw() % SPOTS + 1; spots; spots--) damage();
        uint64_t txn = draw() % 1000; /* otherwise pages that are kept hide the damage */
        if (draw() % 8) for (int m = 0; m < 2; m++) put64(now + m * PAGE + 16 + 128, 50 + 2 * txn + (uint64_t)m), touched[n_touched++] = (uint64_t)m;
        uint64_t cells[2] = {1 + draw() % 3, 1 + draw() % 3}, how = draw() % 8, run = draw() % RUNS;
        kvfs_lookup lookup = {hashes, CHUNKS, RUN, prefix, sizeof prefix, parts, 1 + draw() % 2, cells, 1 + draw() % 2,
                              draw() % 2, NOW, 0};
        uint8_t there[CHUNKS], out[8 * 16], name[34] = {0};
        int64_t rc;
        if (how < 6) {
            int size = (int)(draw() % 3);
            kvfs_walked w = {.rows = rows, .values = values[size], .values_bytes = sizes[size], .segments = segments,
                             .covered = covered, .claimed = claimed};
            rc = kvfs_walk(index, &lookup, run, RUNS, 1 + draw() % 20, (int)(draw() % 2), &w);
            if (!rc) check_answer(&lookup, &w, run);
        } else if (how == 6) {
            rc = kvfs_there(index, &lookup, run * RUN, 1, CHUNKS - run * RUN < 32 ? CHUNKS - run * RUN : 32, there);
        } else {
            memcpy(name, prefix, 32);
            rc = kvfs_parts(index, name, 34, out, 16, &txn);
            CHECK(rc <= 16);
        }
        CHECK(rc >= 0 || is_refusal(rc));
        answers[rc >= 0 ? 0 : rc == -EIO ? 1 : 2]++;
        if (i % 500000 == 499999) { /* what is known of a run that is stopped */
            printf("%llu executions so far\n", (unsigned long long)(i + 1));
            fflush(stdout);
        }
    }
    printf("%llu executions: %llu answered, %llu damaged, %llu refused otherwise\n", (unsigned long long)executions,
           (unsigned long long)answers[0], (unsigned long long)answers[1], (unsigned long long)answers[2]);
    void *all[] = {now, rows, segments, index, values[0], values[1], values[2], image};
    for (int i = 0; i < 8; i++) free(all[i]);
    CHECK(executions < 1000 || (answers[0] > executions / 20 && answers[1] > executions / 20));
    return 0;
}
