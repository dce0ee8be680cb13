/* Prefixes and leases of ranks, against a plain model: included by check.c. */

enum { UNITS = 96, PER_PAGE = 2, LEAVES = 3, ENTRIES_MAX = 1024, PAGES = UNITS / PER_PAGE };

static void page_hash(uint64_t number, uint8_t *hash) {
    kvfs_blake2b((const uint8_t *)&number, sizeof number, hash);
}

static void check_ranks(void) {
    static _Alignas(8) uint8_t memory[ENTRIES_MAX * 128];
    static uint32_t held[UNITS];
    memset(held, 0xff, sizeof held);
    uint64_t size = kvfs_entry_bytes(PER_PAGE, LEAVES), state = 88172645463325252ull;
    kvfs_prefixes p = {memory, PAGES * 3 / 2 / KVFS_WAYS + 1, size, PER_PAGE, LEAVES, 1};
    CHECK(size % 8 == 0 && p.buckets * KVFS_WAYS * size <= sizeof memory);
    uint64_t shown[PAGES] = {0}; /* by place, two units each: the page there, 0: none */
    for (int round = 1; round <= 20000; round++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        uint64_t place = state % PAGES, page = 1 + (state >> 20) % 64;
        uint32_t units[PER_PAGE] = {(uint32_t)(2 * place), (uint32_t)(2 * place + 1)}, out[PER_PAGE], sub = 0;
        if (state >> 40 & 1) {
            uint8_t hash[32];
            uint64_t leaves[LEAVES] = {page, page ^ 7, (uint64_t)round};
            page_hash(page, hash);
            kvfs_publish(&p, held, hash, &sub, units, leaves, 1, (uint64_t)round);
            for (int i = 0; i < PAGES; i++)
                if (shown[i] == page) shown[i] = 0; /* a page is in one place only */
            shown[place] = page;
        } else {
            CHECK(kvfs_retract(&p, held, units, PER_PAGE, out) == (shown[place] != 0));
            shown[place] = 0;
        }
        uint8_t hash[32], good;
        uint32_t entry, chunk = 5;
        int64_t there[PER_PAGE], words[KVFS_HEAD_WORDS + 2 * KVFS_GRANULE_WORDS], *of = words + KVFS_HEAD_WORDS;
        kvfs_pull pull = {32, 2, 16, UNITS, {0, 7}};
        const uint32_t batch = 1;
        const int32_t flags[2] = {0, 1};
        uint64_t seq, leaves[LEAVES], where = PAGES;
        page_hash(page, hash);
        for (int i = 0; i < PAGES; i++)
            if (shown[i] == page) where = (uint64_t)i;
        CHECK(kvfs_held(&p, hash, 1, 9, &entry, &seq) == 1);
        CHECK((entry != 0xffffffff) == (where < PAGES)); /* there is room for every page: none is replaced */
        if (where == PAGES) continue;
        CHECK(kvfs_pull_list(&p, &pull, &entry, &seq, &chunk, 1, 9, &batch, there, leaves, words) == 1);
        CHECK(there[0] == (int64_t)(2 * where) && there[1] == there[0] + 1);
        CHECK(leaves[0] == page && leaves[1] == (page ^ 7));
        CHECK(words[0] == 2 && words[1] == 7 && words[KVFS_HEAD_LEAVES] == 0);
        CHECK(of[0] == 0 && of[1] == 160 && of[2] == 9 && of[3] == 16 && of[4] == 176 && of[5] == 9);
        pull.units_max = 2 * where; /* a unit too high */
        CHECK(kvfs_pull_list(&p, &pull, &entry, &seq, &chunk, 1, 9, &batch, there, leaves, words) == 0);
        pull.units_max = UNITS;
        CHECK(kvfs_unchanged(&p, &entry, &seq, NULL, 1, &good) == 1 && good);
        CHECK(kvfs_unchanged(&p, &entry, &seq, flags, 1, &good) == 1 && good);
        CHECK(kvfs_unchanged(&p, &entry, &seq, flags + 1, 1, &good) == 0 && !good);
        uint32_t reused[1] = {(uint32_t)(2 * where + 1)};
        CHECK(kvfs_retract(&p, held, reused, 1, out) == 1 && out[0] == entry);
        shown[where] = 0;
        CHECK(kvfs_unchanged(&p, &entry, &seq, NULL, 1, &good) == 0 && !good);
        CHECK(kvfs_pull_list(&p, &pull, &entry, &seq, &chunk, 1, 9, &batch, there, leaves, words) == 0);
    }

    /* three pages in two work lists, each of which has its own leaves; a page that is gone ends the last one */
    memset(memory, 0, sizeof memory);
    memset(held, 0xff, sizeof held);
    uint8_t hashes[3 * 32];
    uint32_t subs[3] = {0}, pairs[6] = {0, 1, 2, 3, 4, 5}, found[3], chunks[3] = {4, 5, 6}, batches[] = {2, 1};
    uint64_t sums[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, seqs[3], copied[9];
    int64_t there[6], lists[2 * KVFS_HEAD_WORDS + 3 * 2 * KVFS_GRANULE_WORDS];
    kvfs_pull pull = {32, 2, 16, UNITS, {0, 7, [KVFS_HEAD_LEAVES] = 1000}};
    for (uint64_t i = 0; i < 3; i++) page_hash(i + 1, hashes + 32 * i);
    kvfs_publish(&p, held, hashes, subs, pairs, sums, 3, 1);
    CHECK(kvfs_held(&p, hashes, 3, 1, found, seqs) == 3);
    CHECK(kvfs_pull_list(&p, &pull, found, seqs, chunks, 3, 9, batches, there, copied, lists) == 3);
    int64_t *second_list = lists + KVFS_HEAD_WORDS + 2 * 2 * KVFS_GRANULE_WORDS, *list = second_list + KVFS_HEAD_WORDS;
    CHECK(lists[0] == 4 && lists[KVFS_HEAD_LEAVES] == 1000);
    CHECK(second_list[0] == 2 && second_list[1] == 7 && second_list[KVFS_HEAD_LEAVES] == 1000 + 8 * 2 * LEAVES);
    CHECK(list[0] == 64 && list[1] == 192 && list[2] == 11 && there[5] == 5 && !memcmp(sums, copied, sizeof sums));
    uint32_t gone[PER_PAGE], last = 2;
    CHECK(kvfs_retract(&p, held, &last, 1, gone) == 1);
    CHECK(kvfs_pull_list(&p, &pull, found, seqs, chunks, 3, 9, batches, there, copied, lists) == 1 && lists[0] == 2);

    static _Alignas(8) uint8_t slots[4 * 24];
    kvfs_leases l = {slots, 4, 24}; /* 128 entries */
    uint32_t entries[] = {0, 63, 64, 127, 500}, free_one = 5;
    uint8_t busy[5];
    uint64_t first = 100ull << KVFS_NONCE_BITS | 1;
    CHECK(kvfs_lease(&l, first, 50) == 0);
    kvfs_lease_entries(&l, 0, 0, entries, 5); /* what is beyond the bits is left out */
    CHECK(kvfs_leased(&l, 99, entries, 5, busy) == 4 && !busy[4]);
    CHECK(kvfs_leased(&l, 99, &free_one, 1, busy) == 0);
    CHECK(kvfs_leased(&l, 100, entries, 4, busy) == 0); /* its deadline has passed */
    for (uint64_t i = 1; i < 4; i++) CHECK(kvfs_lease(&l, 100ull << KVFS_NONCE_BITS | (i + 1), 50) == (int64_t)i);
    CHECK(kvfs_lease(&l, 200ull << KVFS_NONCE_BITS | 9, 100 + KVFS_GRACE_MS - 1) == -EBUSY);
    uint64_t second = 3000ull << KVFS_NONCE_BITS | 9;
    CHECK(kvfs_lease(&l, second, 100 + KVFS_GRACE_MS) == 0);
    kvfs_end_lease(&l, 0, first); /* late: the slot has another lease */
    kvfs_lease_entries(&l, 0, 60, entries, 2); /* 60 and 123 */
    uint32_t numbers[] = {60, 123, 0};
    CHECK(kvfs_leased(&l, 2000, numbers, 3, busy) == 2 && !busy[2]);
    kvfs_end_lease(&l, 0, second);
    CHECK(kvfs_leased(&l, 2000, numbers, 3, busy) == 0);
}
