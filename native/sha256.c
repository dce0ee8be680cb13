/* SHA-256 chains: by the CPU's instructions where it has them. */
#include "hash.h"
#include "kvfs_native.h"

static const uint32_t K[64] __attribute__((aligned(64))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

typedef void blocks_of(uint32_t state[8], const uint8_t *data, uint64_t blocks);

static inline uint32_t ror(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void blocks_portable(uint32_t s[8], const uint8_t *p, uint64_t blocks) {
    for (; blocks--; p += 64) {
        uint32_t w[64], v[8];
        memcpy(v, s, 32);
        for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(load32(p + 4 * i));
        for (int i = 16; i < 64; i++)
            w[i] = (ror(w[i - 2], 17) ^ ror(w[i - 2], 19) ^ w[i - 2] >> 10) + w[i - 7] +
                   (ror(w[i - 15], 7) ^ ror(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 16];
        for (int i = 0; i < 64; i++) {
            uint32_t e = v[4], a = v[0];
            uint32_t one = v[7] + (ror(e, 6) ^ ror(e, 11) ^ ror(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
            uint32_t two = (ror(a, 2) ^ ror(a, 13) ^ ror(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
            memmove(v + 1, v, 28);
            v[4] += one;
            v[0] = one + two;
        }
        for (int i = 0; i < 8; i++) s[i] += v[i];
    }
}

#if defined(__x86_64__)
#include <immintrin.h>
__attribute__((target("sha,sse4.1,ssse3"))) static void blocks_fast(uint32_t s[8], const uint8_t *p, uint64_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)s), 0xB1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)(s + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; blocks--; p += 64) {
        __m128i abef_in = abef, cdgh_in = cdgh, m[4];
        for (int i = 0; i < 4; i++)
            m[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)), swap);
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            __m128i x = _mm_add_epi32(m[r & 3], _mm_load_si128((const __m128i *)(const void *)&K[4 * r]));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, x);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(x, 0x0E));
            if (r < 12) { /* the message words of round r + 4 */
                __m128i y = _mm_sha256msg1_epu32(m[r & 3], m[(r + 1) & 3]);
                y = _mm_add_epi32(y, _mm_alignr_epi8(m[(r + 3) & 3], m[(r + 2) & 3], 4));
                m[r & 3] = _mm_sha256msg2_epu32(y, m[(r + 3) & 3]);
            }
        }
        abef = _mm_add_epi32(abef, abef_in);
        cdgh = _mm_add_epi32(cdgh, cdgh_in);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)(void *)s, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(void *)(s + 4), _mm_alignr_epi8(high, low, 8));
}
#elif defined(__aarch64__)
#include <arm_neon.h>
__attribute__((target("+crypto"))) static void blocks_fast(uint32_t s[8], const uint8_t *p, uint64_t blocks) {
    uint32x4_t abcd = vld1q_u32(s), efgh = vld1q_u32(s + 4);
    for (; blocks--; p += 64) {
        uint32x4_t abcd_in = abcd, efgh_in = efgh, m[4];
        for (int i = 0; i < 4; i++) m[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(p + 16 * i)));
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            uint32x4_t x = vaddq_u32(m[r & 3], vld1q_u32(&K[4 * r])), before = abcd;
            abcd = vsha256hq_u32(abcd, efgh, x);
            efgh = vsha256h2q_u32(efgh, before, x);
            if (r < 12)
                m[r & 3] = vsha256su1q_u32(vsha256su0q_u32(m[r & 3], m[(r + 1) & 3]), m[(r + 2) & 3], m[(r + 3) & 3]);
        }
        abcd = vaddq_u32(abcd, abcd_in);
        efgh = vaddq_u32(efgh, efgh_in);
    }
    vst1q_u32(s, abcd);
    vst1q_u32(s + 4, efgh);
}
#else
#define blocks_fast blocks_portable
#endif

typedef struct {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t total;
} sha;

static void add(sha *h, blocks_of *blocks, const uint8_t *data, uint64_t n) {
    uint64_t have = h->total & 63;
    h->total += n;
    if (have) {
        uint64_t take = n < 64 - have ? n : 64 - have;
        memcpy(h->block + have, data, take);
        if (have + take < 64) return;
        blocks(h->state, h->block, 1);
        data += take;
        n -= take;
    }
    if (n >= 64) blocks(h->state, data, n / 64);
    memcpy(h->block, data + n / 64 * 64, n & 63);
}

static void finish(sha *h, blocks_of *blocks, uint8_t out[32]) {
    uint64_t have = h->total & 63, bits = __builtin_bswap64(h->total * 8);
    h->block[have++] = 0x80;
    if (have > 56) {
        memset(h->block + have, 0, 64 - have);
        blocks(h->state, h->block, 1);
        have = 0;
    }
    memset(h->block + have, 0, 56 - have);
    memcpy(h->block + 56, &bits, 8);
    blocks(h->state, h->block, 1);
    for (int i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(h->state[i]);
        memcpy(out + 4 * i, &word, 4);
    }
}

void kvfs_chain(
    const uint8_t *tokens, uint64_t first, uint64_t end, uint64_t step, const uint8_t *seed, uint64_t seed_bytes,
    const kvfs_extra *extra, uint64_t n_extra, const uint8_t *extra_bytes, uint8_t *out) {
    blocks_of *blocks = kvfs_cpu() & KVFS_FEATURE_SHA ? blocks_fast : blocks_portable;
    const uint8_t *parent = first ? out + 32 * (first - 1) : seed;
    uint64_t e = 0, parent_bytes = first ? 32 : seed_bytes;
    while (e < n_extra && extra[e].chunk < first) e++;
    for (uint64_t i = first; i < end; i++) {
        sha h;
        memcpy(h.state, START, 32);
        h.total = 0;
        add(&h, blocks, parent, parent_bytes);
        add(&h, blocks, tokens + i * step, step);
        if (e < n_extra && extra[e].chunk == i) {
            add(&h, blocks, extra_bytes + extra[e].offset, extra[e].nbytes);
            e++;
        }
        finish(&h, blocks, out + 32 * i);
        parent = out + 32 * i;
        parent_bytes = 32;
    }
}

void kvfs_keys(
    const uint8_t *head, uint64_t head_bytes, const uint8_t *keys, uint64_t key_bytes, uint64_t count, uint8_t *out) {
    blocks_of *blocks = kvfs_cpu() & KVFS_FEATURE_SHA ? blocks_fast : blocks_portable;
    for (uint64_t i = 0; i < count; i++) {
        sha h;
        memcpy(h.state, START, 32);
        h.total = 0;
        add(&h, blocks, head, head_bytes);
        add(&h, blocks, keys + i * key_bytes, key_bytes);
        finish(&h, blocks, out + 32 * i);
    }
}
