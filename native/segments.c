/* Segments that a process holds open: opened, shared and closed without waiting. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvfs_native.h"

#ifndef SYS_openat2
#define SYS_openat2 437 /* older C libraries lack it */
#endif

enum { TO_CLOSE = -2 }; /* less a descriptor: what kvfs_release leaves to kvfs_close */
enum { PLACES = 2 * KVFS_FILES_MAX, WINDOW = 32 }; /* of the table; a segment is at one of so many places */

typedef struct {
    uint8_t id[16];
    int32_t fd;
    uint32_t holds; /* 0: nothing here */
} place;

struct kvfs_files {
    int pid;
    uint32_t busy, open;
    place places[PLACES];
};

uint64_t kvfs_files_bytes(void) { return sizeof(kvfs_files); }

void kvfs_files_init(kvfs_files *files) {
    files->pid = getpid();
}

/* Without the interpreter's lock (free-threaded builds) several calls may be in progress. */
static int enter(kvfs_files *files) {
    if (files->pid != getpid()) return 0;
    while (__atomic_exchange_n(&files->busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
    return 1;
}
static void leave(kvfs_files *files) { __atomic_store_n(&files->busy, 0, __ATOMIC_RELEASE); }

static int open_now(int folder, const char *name) {
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
#ifdef KVFS_MAY_WAIT
    return openat(folder, name, flags);
#else
    enum { CACHED = 0x20 }; /* RESOLVE_CACHED */
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)flags, 0, CACHED};
    return (int)syscall(SYS_openat2, folder, name, &how, sizeof how);
#endif
}

/* The segment, open and locked shared; -1 if that cannot be had at once. */
static int open_locked(int folder, const uint8_t *id) {
    static const char digits[] = "0123456789abcdef";
    char name[] = "0123456789abcdef0123456789abcdef.kvs";
    for (int j = 0; j < 16; j++) {
        name[2 * j] = digits[id[j] >> 4];
        name[2 * j + 1] = digits[id[j] & 15];
    }
    struct stat st;
    int fd = open_now(folder, name);
    /* an unlink happens under LOCK_EX: under LOCK_SH the number of names stays what it is */
    if (fd >= 0 && (flock(fd, LOCK_SH | LOCK_NB) || fstat(fd, &st) || !S_ISREG(st.st_mode) || !st.st_nlink)) {
        close(fd);
        fd = -1;
    }
    /* an access time is a write to the journal, for which even a read with RWF_NOWAIT waits; only the owner may refuse */
    if (fd >= 0) (void)!fcntl(fd, F_SETFL, O_NOATIME);
    return fd;
}

static int32_t hold(kvfs_files *files, int folder, const uint8_t *id) {
    uint64_t first, free = PLACES;
    memcpy(&first, id, 8);
    for (uint64_t i = 0; i < WINDOW; i++) {
        uint64_t at = (first + i) % PLACES;
        place *p = &files->places[at];
        if (!p->holds) {
            if (free == PLACES) free = at;
        } else if (!memcmp(p->id, id, 16)) {
            p->holds++;
            return (int32_t)at;
        }
    }
    if (free == PLACES || files->open == KVFS_FILES_MAX) return -1;
    place *p = &files->places[free];
    if ((p->fd = open_locked(folder, id)) < 0) return -1;
    memcpy(p->id, id, 16);
    p->holds = 1;
    files->open++;
    return (int32_t)free;
}

uint64_t kvfs_hold(kvfs_files *files, int folder, const uint8_t *ids, uint64_t count, int32_t *held) {
    uint64_t got = 0;
    if (!enter(files)) return 0;
    for (uint64_t i = 0; i < count; i++) got += (held[i] = hold(files, folder, ids + 16 * i)) >= 0;
    leave(files);
    return got;
}

uint64_t kvfs_release(kvfs_files *files, int32_t *held, uint64_t count) {
    uint64_t left = 0;
    if (!enter(files)) return 0;
    for (uint64_t i = 0; i < count; i++) {
        int32_t was = __atomic_load_n(&held[i], __ATOMIC_RELAXED), now = -1;
        place *p = was >= 0 ? &files->places[was] : NULL;
        left += was < -1; /* by an earlier call, whose caller was interrupted */
        if (!p) continue;
        if (!--p->holds) {
            struct stat st;
            files->open--;
            if (!fstat(p->fd, &st) && !st.st_nlink) now = TO_CLOSE - p->fd, left++;
            else close(p->fd);
        }
        __atomic_store_n(&held[i], now, __ATOMIC_RELAXED);
    }
    leave(files);
    return left;
}

void kvfs_close(int32_t *held, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        int32_t was = __atomic_load_n(&held[i], __ATOMIC_RELAXED);
        /* of two threads one closes it */
        if (was <= TO_CLOSE && __atomic_compare_exchange_n(
                                   &held[i], &was, -1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            close(TO_CLOSE - was);
    }
}

int kvfs_file(const kvfs_files *files, int32_t held) { return held < 0 ? -1 : files->places[held].fd; }

uint64_t kvfs_files_open(const kvfs_files *files) { return files->pid == getpid() ? files->open : 0; }

void kvfs_files_abandon(kvfs_files *files) {
    if (files->pid == getpid()) return;
    for (int i = 0; i < PLACES; i++)
        if (files->places[i].holds) close(files->places[i].fd);
    memset(files->places, 0, sizeof files->places);
    for (int i = 0; i < PLACES; i++) files->places[i].fd = -1; /* 0 would be the child's standard input */
}
