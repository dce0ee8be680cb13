/* Prefixes that the GPU of a rank holds, in memory that the ranks of a host share, and leases on them. */
#include <errno.h>
#include <string.h>

#include "hash.h"
#include "kvfs_native.h"

enum { NONE = 0xffffffff, FIXED = 56 };

/* seq: odd while the owner writes, and never the same twice. A retracted entry has a hash of zeros. */
typedef struct {
    uint64_t seq;
    uint8_t hash[32];
    uint64_t stamp; /* order of publication */
    uint32_t sub;   /* number of the page in its unit, where a unit holds several */
    uint32_t zero;
    /* uint32_t units[], then uint64_t leaves[], aligned to 8 */
} entry;

/* state: deadline (CLOCK_MONOTONIC, ms) << KVFS_NONCE_BITS | nonce of the lease; 0: free. In one word, so that a reader
 * that dies at any point leaves a slot whose deadline passes. */
struct slot {
    uint64_t state;
    uint64_t bits[];
};

static uint64_t units_bytes(const kvfs_prefixes *p) { return (4 * p->n_units + 7) & ~7ull; }

uint64_t kvfs_entry_bytes(uint64_t n_units, uint64_t n_leaves) {
    kvfs_prefixes p = {.n_units = n_units};
    return FIXED + units_bytes(&p) + 8 * n_leaves;
}

static entry *at(const kvfs_prefixes *p, uint64_t number) { return (entry *)(p->entries + number * p->entry_bytes); }
static uint32_t *units_of(entry *e) { return (uint32_t *)((uint8_t *)e + FIXED); }
static uint64_t *leaves_of(const kvfs_prefixes *p, entry *e) {
    return (uint64_t *)((uint8_t *)e + FIXED + units_bytes(p));
}
/* A page is in one of two buckets: with one, a table that is half full would lack a page of every hundred, and the
 * prefix behind it. */
static uint64_t bucket_of(const kvfs_prefixes *p, const uint8_t *hash, int which) {
    return load64(hash + 8 * which) % p->buckets * KVFS_WAYS;
}

static uint64_t seq_of(entry *e) { return __atomic_load_n(&e->seq, __ATOMIC_ACQUIRE); }
static void begin(entry *e) {
    __atomic_store_n(&e->seq, e->seq | 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static void end(entry *e) { __atomic_store_n(&e->seq, e->seq + 1, __ATOMIC_RELEASE); }

static uint32_t *holder(const kvfs_prefixes *p, uint32_t *held, uint64_t unit, uint32_t sub) {
    return held + unit * p->per_unit + sub;
}

static int published(const entry *e) {
    static const uint8_t zeros[32];
    return e->seq && memcmp(e->hash, zeros, 32);
}

static void drop(const kvfs_prefixes *p, uint32_t *held, uint64_t number) {
    entry *e = at(p, number);
    if (!published(e)) return;
    for (uint64_t i = 0; i < p->n_units; i++) {
        uint32_t *mine = holder(p, held, units_of(e)[i], e->sub);
        if (*mine == number) *mine = NONE;
    }
    begin(e);
    memset(e->hash, 0, 32);
    end(e);
}

/* Where a page goes: its own entry, else a free one of the bucket that has more, else the oldest. */
static uint64_t place_for(const kvfs_prefixes *p, const uint8_t *hash) {
    uint64_t best = NONE, oldest = bucket_of(p, hash, 0), most = 0;
    for (int which = 0; which < 2; which++) {
        uint64_t first = bucket_of(p, hash, which), empty = NONE, count = 0;
        for (uint64_t number = first; number < first + KVFS_WAYS; number++) {
            entry *e = at(p, number);
            if (!memcmp(e->hash, hash, 32)) return number;
            if (!published(e)) {
                empty = number;
                count++;
            } else if (published(at(p, oldest)) && e->stamp < at(p, oldest)->stamp) {
                oldest = number;
            }
        }
        if (count > most) {
            most = count;
            best = empty;
        }
    }
    return best == NONE ? oldest : best;
}

void kvfs_publish(
    const kvfs_prefixes *p, uint32_t *held, const uint8_t *hashes, const uint32_t *subs, const uint32_t *units,
    const uint64_t *leaves, uint64_t n, uint64_t stamp) {
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t *mine = units + i * p->n_units;
        uint64_t number = place_for(p, hashes + 32 * i);
        for (uint64_t j = 0; j < p->n_units; j++) {
            uint32_t other = *holder(p, held, mine[j], subs[i]);
            if (other != NONE) drop(p, held, other);
        }
        drop(p, held, number);
        entry *e = at(p, number);
        begin(e);
        memcpy(e->hash, hashes + 32 * i, 32);
        e->stamp = stamp;
        e->sub = subs[i];
        memcpy(units_of(e), mine, 4 * p->n_units);
        memcpy(leaves_of(p, e), leaves + i * p->n_leaves, 8 * p->n_leaves);
        end(e);
        for (uint64_t j = 0; j < p->n_units; j++) *holder(p, held, mine[j], subs[i]) = (uint32_t)number;
    }
}

uint64_t kvfs_retract(const kvfs_prefixes *p, uint32_t *held, const uint32_t *units, uint64_t n, uint32_t *out) {
    uint64_t found = 0;
    for (uint64_t i = 0; i < n; i++)
        for (uint32_t sub = 0; sub < p->per_unit; sub++) {
            uint32_t number = *holder(p, held, units[i], sub);
            if (number == NONE) continue;
            drop(p, held, number);
            out[found++] = number;
        }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before the caller looks for leases; pairs with kvfs_lease */
    return found;
}

/* The entry if it has the hash, and its seq. */
static uint32_t find(const kvfs_prefixes *p, const uint8_t *hash, uint64_t *seq) {
    for (int which = 0; which < 2; which++) {
        uint64_t first = bucket_of(p, hash, which);
        for (uint64_t number = first; number < first + KVFS_WAYS; number++) {
            entry *e = at(p, number);
            uint64_t before = seq_of(e);
            if (!before || before & 1 || memcmp(e->hash, hash, 32)) continue;
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (__atomic_load_n(&e->seq, __ATOMIC_RELAXED) != before) continue;
            *seq = before;
            return (uint32_t)number;
        }
    }
    return NONE;
}

uint64_t kvfs_held(
    const kvfs_prefixes *p, const uint8_t *hashes, uint64_t n, uint64_t misses_max, uint32_t *entries, uint64_t *seqs) {
    uint64_t i, misses = 0;
    for (i = 0; i < n && misses < misses_max; i++) {
        entries[i] = find(p, hashes + 32 * i, seqs + i);
        misses += entries[i] == NONE;
    }
    return i;
}

uint64_t kvfs_pull_list(
    const kvfs_prefixes *p, const kvfs_pull *pull, const uint32_t *entries, const uint64_t *seqs,
    const uint32_t *chunks, uint64_t n, uint64_t first, const uint32_t *batches, int64_t *units, uint64_t *leaves,
    int64_t *words) {
    uint64_t i, left = 0, granules = 0;
    int64_t *start = words, *head = words;
    for (i = 0; i < n; i++) {
        entry *e = at(p, entries[i] % (p->buckets * KVFS_WAYS));
        int64_t *to = units + i * p->n_units;
        int good = seq_of(e) == seqs[i];
        for (uint64_t j = 0; j < p->n_units; j++) {
            to[j] = units_of(e)[j];
            good &= (uint64_t)to[j] < pull->units_max;
        }
        memcpy(leaves + i * p->n_leaves, leaves_of(p, e), 8 * p->n_leaves);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!good || __atomic_load_n(&e->seq, __ATOMIC_RELAXED) != seqs[i]) break;
        if (!left) {
            left = *batches++;
            granules = 0;
            head = words += (words - start) & 1;
            memcpy(head, pull->head, sizeof pull->head);
            head[KVFS_HEAD_LEAVES] += (int64_t)(8 * i * p->n_leaves);
            words += KVFS_HEAD_WORDS;
        }
        left--;
        uint64_t source = (i * p->per_unit + chunks[i] % p->per_unit) * pull->states;
        for (uint64_t g = 0; g < pull->granules; g++, words += KVFS_GRANULE_WORDS) {
            words[0] = (int64_t)(source + g * pull->step);
            words[1] = (int64_t)(chunks[i] * pull->states + g * pull->step);
            words[2] = (int64_t)(first + i);
        }
        granules += pull->granules;
        head[0] = (int64_t)granules;
    }
    return i;
}

uint64_t kvfs_unchanged(
    const kvfs_prefixes *p, const uint32_t *entries, const uint64_t *seqs, const int32_t *flags, uint64_t n,
    uint8_t *good) {
    uint64_t all = 0;
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* behind the lease, or behind the end of the copies */
    for (uint64_t i = 0; i < n; i++) {
        good[i] = seq_of(at(p, entries[i] % (p->buckets * KVFS_WAYS))) == seqs[i] && !(flags && flags[i]);
        all += good[i];
    }
    return all;
}

/* -- leases ---------------------------------------------------------------------------------------------------- */

static struct slot *slot_at(const kvfs_leases *l, uint64_t i) { return (struct slot *)(l->slots + i * l->slot_bytes); }
static uint64_t words(const kvfs_leases *l) { return (l->slot_bytes - sizeof(struct slot)) / 8; }

static uint64_t deadline_of(uint64_t state) { return state >> KVFS_NONCE_BITS; }

int64_t kvfs_lease(const kvfs_leases *l, uint64_t state, uint64_t now) {
    for (uint64_t i = 0; i < l->n_slots; i++) {
        struct slot *s = slot_at(l, i);
        uint64_t before = __atomic_load_n(&s->state, __ATOMIC_ACQUIRE);
        if (before && deadline_of(before) + KVFS_GRACE_MS > now) continue;
        if (!__atomic_compare_exchange_n(&s->state, &before, state, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) continue;
        /* a holder that slept here until its grace was over may clear the bits of the next one: that one still finds
         * out whether its entries changed */
        memset(s->bits, 0, 8 * words(l));
        return (int64_t)i;
    }
    return -EBUSY;
}

void kvfs_lease_entries(const kvfs_leases *l, uint64_t slot, uint64_t first, const uint32_t *entries, uint64_t n) {
    struct slot *s = slot_at(l, slot % l->n_slots);
    for (uint64_t j = 0; j < n; j++) {
        uint64_t number = first + entries[j];
        if (number / 64 < words(l)) s->bits[number / 64] |= 1ull << number % 64;
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before the caller looks at the entries again: kvfs_unchanged */
}

void kvfs_end_lease(const kvfs_leases *l, uint64_t number, uint64_t state) {
    struct slot *s = slot_at(l, number % l->n_slots); /* unless it was late, and the slot was taken */
    __atomic_compare_exchange_n(&s->state, &state, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

uint64_t kvfs_leased(const kvfs_leases *l, uint64_t now, const uint32_t *entries, uint64_t n, uint8_t *busy) {
    uint64_t all = 0;
    memset(busy, 0, n);
    for (uint64_t i = 0; i < l->n_slots; i++) {
        struct slot *s = slot_at(l, i);
        uint64_t state = __atomic_load_n(&s->state, __ATOMIC_ACQUIRE);
        if (!state || deadline_of(state) <= now) continue;
        for (uint64_t j = 0; j < n; j++)
            if (entries[j] / 64 < words(l) && s->bits[entries[j] / 64] >> entries[j] % 64 & 1) busy[j] = 1;
    }
    for (uint64_t j = 0; j < n; j++) all += busy[j];
    return all;
}
