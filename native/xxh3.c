/* XXH3-64 and XXH3-128, after the specification (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
 *
 * Written for kvfs rather than vendored: the store needs two entry points, and the tests compare them with the xxhash
 * package, on which the store depends anyway, for each length class and seed. */
#include "hash.h"
#include "kvfs_native.h"

#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P32_3 0xC2B2AE3Dull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull
#define MX1 0x165667919E3779F9ull
#define MX2 0x9FB21C651E98DF25ull

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

typedef unsigned __int128 u128;
typedef struct {
    uint64_t low, high;
} pair;

static inline uint64_t rol(uint64_t x, int n) { return x << n | x >> (64 - n); }
static inline uint64_t word(int at) { return load64(SECRET + at); }
static inline uint64_t fold(uint64_t a, uint64_t b) {
    u128 product = (u128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}
static inline uint64_t avalanche(uint64_t x) {
    x ^= x >> 37;
    x *= MX1;
    return x ^ x >> 32;
}
static inline uint64_t avalanche64(uint64_t x) {
    x ^= x >> 33;
    x *= P64_2;
    x ^= x >> 29;
    x *= P64_3;
    return x ^ x >> 32;
}

/* -- up to 16 bytes ------------------------------------------------------------------------------------------ */

static inline uint32_t ends_of(const uint8_t *p, uint64_t n) {
    return p[n - 1] | (uint32_t)n << 8 | (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24;
}

static uint64_t small_64(const uint8_t *p, uint64_t n, uint64_t seed) {
    if (n > 8) {
        uint64_t low = ((word(24) ^ word(32)) + seed) ^ load64(p);
        uint64_t high = ((word(40) ^ word(48)) - seed) ^ load64(p + n - 8);
        return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (n >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t x = ((word(8) ^ word(16)) - seed) ^ (load32(p + n - 4) | (uint64_t)load32(p) << 32);
        x ^= rol(x, 49) ^ rol(x, 24);
        x *= MX2;
        x ^= (x >> 35) + n;
        x *= MX2;
        return x ^ x >> 28;
    }
    if (n) return avalanche64(((uint64_t)(load32(SECRET) ^ load32(SECRET + 4)) + seed) ^ ends_of(p, n));
    return avalanche64(seed ^ word(56) ^ word(64));
}

static pair small_128(const uint8_t *p, uint64_t n) {
    if (n > 8) {
        uint64_t first = load64(p), last = load64(p + n - 8);
        uint64_t one = word(32) ^ word(40) ^ first ^ last, two = word(48) ^ word(56) ^ last;
        u128 product = (u128)one * P64_1;
        uint64_t low = (uint64_t)product + ((n - 1) << 54);
        uint64_t high = (uint64_t)(product >> 64) + (two >> 32 << 32) + (uint32_t)two * P32_2;
        low ^= __builtin_bswap64(high);
        product = (u128)low * P64_2;
        return (pair){avalanche((uint64_t)product), avalanche((uint64_t)(product >> 64) + high * P64_2)};
    }
    if (n >= 4) {
        uint64_t x = word(16) ^ word(24) ^ (load32(p) | (uint64_t)load32(p + n - 4) << 32);
        u128 product = (u128)x * (P64_1 + (n << 2));
        uint64_t low = (uint64_t)product, high = (uint64_t)(product >> 64) + (low << 1);
        low ^= high >> 3;
        low ^= low >> 35;
        low *= MX2;
        low ^= low >> 28;
        return (pair){low, avalanche(high)};
    }
    if (n) {
        uint32_t ends = ends_of(p, n), turned = __builtin_bswap32(ends);
        turned = turned << 13 | turned >> 19;
        uint64_t low = load32(SECRET) ^ load32(SECRET + 4), high = load32(SECRET + 8) ^ load32(SECRET + 12);
        return (pair){avalanche64(low ^ ends), avalanche64(high ^ turned)};
    }
    return (pair){avalanche64(word(64) ^ word(72)), avalanche64(word(80) ^ word(88))};
}

/* -- up to 240 bytes ----------------------------------------------------------------------------------------- */

static inline uint64_t mix(const uint8_t *p, int at, uint64_t seed) {
    return fold(load64(p) ^ (word(at) + seed), load64(p + 8) ^ (word(at + 8) - seed));
}

static uint64_t medium_64(const uint8_t *p, uint64_t n, uint64_t seed) {
    uint64_t acc = n * P64_1;
    if (n <= 128) {
        for (int i = (int)((n - 1) >> 5); i >= 0; i--)
            acc += mix(p + 16 * i, 32 * i, seed) + mix(p + n - 16 * i - 16, 32 * i + 16, seed);
        return avalanche(acc);
    }
    for (int i = 0; i < 8; i++) acc += mix(p + 16 * i, 16 * i, seed);
    acc = avalanche(acc);
    for (int i = 8; i < (int)(n >> 4); i++) acc += mix(p + 16 * i, 16 * (i - 8) + 3, seed);
    return avalanche(acc + mix(p + n - 16, 119, seed));
}

static inline void mix_two(pair *acc, const uint8_t *one, const uint8_t *two, int at) {
    acc->low = (acc->low + mix(one, at, 0)) ^ (load64(two) + load64(two + 8));
    acc->high = (acc->high + mix(two, at + 16, 0)) ^ (load64(one) + load64(one + 8));
}

static pair medium_128(const uint8_t *p, uint64_t n) {
    pair acc = {n * P64_1, 0};
    if (n <= 128) {
        for (int i = (int)((n - 1) >> 5); i >= 0; i--) mix_two(&acc, p + 16 * i, p + n - 16 * i - 16, 32 * i);
    } else {
        for (int i = 0; i < 4; i++) mix_two(&acc, p + 32 * i, p + 32 * i + 16, 32 * i);
        acc = (pair){avalanche(acc.low), avalanche(acc.high)};
        for (int i = 4; i < (int)(n >> 5); i++) mix_two(&acc, p + 32 * i, p + 32 * i + 16, 32 * (i - 4) + 3);
        mix_two(&acc, p + n - 16, p + n - 32, 103);
    }
    uint64_t high = acc.low * P64_1 + acc.high * P64_4 + n * P64_2;
    return (pair){avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

/* -- more: stripes of 64 bytes, blocks of 16 stripes ----------------------------------------------------------- */

typedef kvfs_lanes lanes;

static inline __attribute__((always_inline)) void stripe_portable(uint64_t *acc, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t data = load64(p + 8 * i), key = data ^ load64(secret + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += (key & 0xffffffff) * (key >> 32);
    }
}
static inline __attribute__((always_inline)) void scramble_portable(uint64_t *acc, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ acc[i] >> 47 ^ load64(secret + 128 + 8 * i)) * P32_1;
}

/* The end of an input, of n bytes; or, with ``more``, n bytes before the end, a multiple of 1024. */
#define ACCUMULATE(NAME, LOAD, STRIPE, SCRAMBLE, STORE)                                           \
    static void NAME(lanes *out, const uint8_t *p, uint64_t n, const uint8_t *secret, int more) { \
        LOAD;                                                                                     \
        const uint8_t *last = p + n - 64;                                                         \
        for (uint64_t blocks = (n - !more) / 1024; blocks--; p += 1024) {                         \
            for (int s = 0; s < 16; s++) STRIPE(acc, p + 64 * s, secret + 8 * s);                 \
            SCRAMBLE(acc, secret);                                                                \
        }                                                                                         \
        if (!more) {                                                                              \
            for (uint64_t s = 0, stripes = ((n - 1) & 1023) / 64; s < stripes; s++)               \
                STRIPE(acc, p + 64 * s, secret + 8 * s);                                          \
            STRIPE(acc, last, secret + 121);                                                      \
        }                                                                                         \
        STORE;                                                                                    \
    }

#if defined(__x86_64__)
#include <immintrin.h>
#define IN(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
static inline __attribute__((always_inline)) void stripe_sse2(__m128i *acc, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        __m128i data = IN(p + 16 * i), key = _mm_xor_si128(data, IN(secret + 16 * i));
        __m128i product = _mm_mul_epu32(key, _mm_srli_epi64(key, 32));
        acc[i] = _mm_add_epi64(_mm_add_epi64(acc[i], _mm_shuffle_epi32(data, 0x4E)), product);
    }
}
static inline __attribute__((always_inline)) void scramble_sse2(__m128i *acc, const uint8_t *secret) {
    const __m128i prime = _mm_set1_epi32((int)P32_1);
    for (int i = 0; i < 4; i++) {
        __m128i x = _mm_xor_si128(_mm_xor_si128(acc[i], _mm_srli_epi64(acc[i], 47)), IN(secret + 128 + 16 * i));
        __m128i high = _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(x, 32), prime), 32);
        acc[i] = _mm_add_epi64(_mm_mul_epu32(x, prime), high);
    }
}
ACCUMULATE(accumulate_plain, __m128i acc[4]; memcpy(acc, out, 64), stripe_sse2, scramble_sse2, memcpy(out, acc, 64))

#define IN4(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define AVX2 __attribute__((target("avx2")))
AVX2 static inline __attribute__((always_inline)) void stripe_avx2(__m256i *acc, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 2; i++) {
        __m256i data = IN4(p + 32 * i), key = _mm256_xor_si256(data, IN4(secret + 32 * i));
        __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
        acc[i] = _mm256_add_epi64(_mm256_add_epi64(acc[i], _mm256_shuffle_epi32(data, 0x4E)), product);
    }
}
AVX2 static inline __attribute__((always_inline)) void scramble_avx2(__m256i *acc, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_xor_si256(
            _mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47)), IN4(secret + 128 + 32 * i));
        __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
        acc[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), high);
    }
}
AVX2 ACCUMULATE(accumulate_wide, __m256i acc[2]; memcpy(acc, out, 64), stripe_avx2, scramble_avx2, memcpy(out, acc, 64))
#elif defined(__aarch64__)
#include <arm_neon.h>
static inline __attribute__((always_inline)) void stripe_neon(uint64x2_t *acc, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        uint64x2_t data = vreinterpretq_u64_u8(vld1q_u8(p + 16 * i));
        uint64x2_t key = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(secret + 16 * i)));
        acc[i] = vaddq_u64(acc[i], vextq_u64(data, data, 1));
        acc[i] = vmlal_u32(acc[i], vmovn_u64(key), vshrn_n_u64(key, 32));
    }
}
static inline __attribute__((always_inline)) void scramble_neon(uint64x2_t *acc, const uint8_t *secret) {
    const uint32x2_t prime = vdup_n_u32((uint32_t)P32_1);
    for (int i = 0; i < 4; i++) {
        uint64x2_t x = veorq_u64(acc[i], vshrq_n_u64(acc[i], 47));
        x = veorq_u64(x, vreinterpretq_u64_u8(vld1q_u8(secret + 128 + 16 * i)));
        acc[i] = vmlal_u32(vshlq_n_u64(vmull_u32(vshrn_n_u64(x, 32), prime), 32), vmovn_u64(x), prime);
    }
}
ACCUMULATE(accumulate_plain, uint64x2_t acc[4]; memcpy(acc, out, 64), stripe_neon, scramble_neon, memcpy(out, acc, 64))
#define accumulate_wide accumulate_plain
#else
ACCUMULATE(accumulate_plain, uint64_t acc[8]; memcpy(acc, out, 64), stripe_portable, scramble_portable, memcpy(out, acc, 64))
#define accumulate_wide accumulate_plain
#endif
ACCUMULATE(accumulate_portable, uint64_t acc[8]; memcpy(acc, out, 64), stripe_portable, scramble_portable, memcpy(out, acc, 64))

static const lanes BEGIN = {{P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}};

static void accumulate(lanes *acc, const uint8_t *p, uint64_t n, const uint8_t *secret, int more) {
    uint32_t cpu = kvfs_features();
    if (cpu & KVFS_FEATURE_AVX2) accumulate_wide(acc, p, n, secret, more);
    else if (cpu) accumulate_plain(acc, p, n, secret, more);
    else accumulate_portable(acc, p, n, secret, more);
}

static uint64_t merged(const lanes *acc, const uint8_t *secret, uint64_t start) {
    for (int i = 0; i < 8; i += 2)
        start += fold(acc->lane[i] ^ load64(secret + 8 * i), acc->lane[i + 1] ^ load64(secret + 8 * i + 8));
    return avalanche(start);
}

uint64_t kvfs_xxh3_64(const uint8_t *p, uint64_t n, uint64_t seed) {
    if (n <= 16) return small_64(p, n, seed);
    if (n <= 240) return medium_64(p, n, seed);
    lanes acc = BEGIN;
    uint8_t own[192];
    const uint8_t *secret = SECRET;
    if (seed) {
        for (int i = 0; i < 24; i++) {
            uint64_t x = i & 1 ? word(8 * i) - seed : word(8 * i) + seed;
            memcpy(own + 8 * i, &x, 8);
        }
        secret = own;
    }
    accumulate(&acc, p, n, secret, 0);
    return merged(&acc, secret + 11, n * P64_1);
}

void kvfs_xxh3_begin(kvfs_lanes *acc) { *acc = BEGIN; }
void kvfs_xxh3_more(kvfs_lanes *acc, const uint8_t *p, uint64_t n) { accumulate(acc, p, n, SECRET, 1); }
uint64_t kvfs_xxh3_end(kvfs_lanes *acc, const uint8_t *p, uint64_t n, uint64_t all) {
    accumulate(acc, p, n, SECRET, 0);
    return merged(acc, SECRET + 11, all * P64_1);
}

void kvfs_xxh3_128(const uint8_t *p, uint64_t n, uint8_t *out) {
    pair hash;
    if (n <= 16) hash = small_128(p, n);
    else if (n <= 240) hash = medium_128(p, n);
    else {
        lanes acc = BEGIN;
        accumulate(&acc, p, n, SECRET, 0);
        hash = (pair){merged(&acc, SECRET + 11, n * P64_1), merged(&acc, SECRET + 117, ~(n * P64_2))};
    }
    hash = (pair){__builtin_bswap64(hash.low), __builtin_bswap64(hash.high)};
    memcpy(out, &hash.high, 8);
    memcpy(out + 8, &hash.low, 8);
}
