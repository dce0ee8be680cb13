/* Hashes used inside the library; the public functions are in kvfs_native.h. */
#ifndef KVFS_HASH_H
#define KVFS_HASH_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvfs is little endian on disk; on other machines the Python path is used"
#endif

static inline uint16_t load16(const uint8_t *p) { uint16_t x; memcpy(&x, p, 2); return x; }
static inline uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static inline uint64_t load64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return x; }

/* XXH3-64, without a seed, of more than 240 bytes that come in parts, one behind the other in memory: kvfs_xxh3_more for
 * multiples of 1024 bytes, kvfs_xxh3_end for the last part, of n bytes, at least one. all: of all parts together. */
typedef struct { uint64_t lane[8]; } __attribute__((aligned(64))) kvfs_lanes;
void kvfs_xxh3_begin(kvfs_lanes *acc);
void kvfs_xxh3_more(kvfs_lanes *acc, const uint8_t *p, uint64_t n);
uint64_t kvfs_xxh3_end(kvfs_lanes *acc, const uint8_t *p, uint64_t n, uint64_t all);

/* CPU: bits of KVFS_FEATURE_* that are in use. */
uint32_t kvfs_cpu(void);

#endif
