/* BLAKE2b-256 (RFC 7693) of one buffer, without a key: the names of rows. */
#include "hash.h"
#include "kvfs_native.h"

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

static inline uint64_t ror(uint64_t x, int n) { return x >> n | x << (64 - n); }

#define MIX(a, b, c, d, x, y)   \
    a += b + (x);               \
    d = ror(d ^ a, 32);         \
    c += d;                     \
    b = ror(b ^ c, 24);         \
    a += b + (y);               \
    d = ror(d ^ a, 16);         \
    c += d;                     \
    b = ror(b ^ c, 63);

static void compress(uint64_t h[8], const uint8_t *block, uint64_t total, int last) {
    uint64_t v[16], m[16];
    memcpy(m, block, 128);
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= total;
    if (last) v[14] = ~v[14];
    for (int r = 0; r < 12; r++) {
        const uint8_t *s = SIGMA[r];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

void kvfs_blake2b(const uint8_t *data, uint64_t n, uint8_t *out) {
    uint64_t h[8], at = 0;
    uint8_t block[128] = {0};
    memcpy(h, IV, 64);
    h[0] ^= 0x01010000 ^ 32;
    for (; n - at > 128; at += 128) compress(h, data + at, at + 128, 0);
    memcpy(block, data + at, n - at);
    compress(h, block, n, 1);
    memcpy(out, h, 32);
}
