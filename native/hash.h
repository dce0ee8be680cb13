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

/* CPU: bits of KVFS_FEATURE_* that are in use. */
uint32_t kvfs_cpu(void);

#endif
