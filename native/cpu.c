/* What the CPU has. */
#include "hash.h"
#include "kvfs_native.h"

#if defined(__x86_64__)
#include <cpuid.h>
static uint32_t probe(void) {
    unsigned a, b, c, d, b7 = 0, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    unsigned ssse3 = c >> 9 & 1, sse41 = c >> 19 & 1, osxsave = c >> 27 & 1;
    unsigned a7, c7, d7;
    if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) b7 = 0;
    if (ssse3 && sse41 && (b7 >> 29 & 1)) found |= KVFS_FEATURE_SHA;
    if (osxsave && (b7 >> 5 & 1)) { /* AVX2, and the kernel saves the registers */
        unsigned low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if ((low & 6) == 6) found |= KVFS_FEATURE_AVX2;
    }
    return found;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>
static uint32_t probe(void) {
    return KVFS_FEATURE_NEON | (getauxval(AT_HWCAP) >> 6 & 1 ? KVFS_FEATURE_SHA : 0); /* HWCAP_SHA2 */
}
#else
static uint32_t probe(void) { return 0; }
#endif

enum { PROBED = 1u << 31 };
static uint32_t known; /* 0: not probed yet. Threads that probe at once find the same */

uint32_t kvfs_cpu(void) {
    uint32_t now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!now) __atomic_store_n(&known, now = probe() | PROBED, __ATOMIC_RELAXED);
    return now;
}

uint32_t kvfs_abi(void) { return KVFS_ABI; }
uint32_t kvfs_features(void) { return kvfs_cpu() & ~(uint32_t)PROBED; }
void kvfs_portable(int yes) { __atomic_store_n(&known, yes ? (uint32_t)PROBED : 0, __ATOMIC_RELAXED); }
