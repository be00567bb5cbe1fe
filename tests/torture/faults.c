/* Preloaded: counts the file operations of a process below one folder and lets the n-th kill the process or fail.

   arm(folder, mode, n, error, trace) starts the count; faults.py calls it in the forked child that is attacked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, KILL_HALFWAY, FAIL, FAIL_ON, SHORT };

static char folder[4096];
static int mode = OFF, error_number, trace_fd = -1;
static long at, done;

void arm(const char *below, int how, long n, int error, int trace) {
    snprintf(folder, sizeof folder, "%s/", below);
    error_number = error, trace_fd = trace, at = n, done = 0, mode = how;
}

static int below_folder(const char *path) {
    size_t length = strlen(folder) - 1; /* the folder itself counts too */
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int watched(int dir, const char *path) {
    char full[8192], link[64];
    if (mode == OFF || !path) return 0;
    if (path[0] == '/') return below_folder(path);
    snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
    ssize_t size = readlink(link, full, 4000);
    if (size < 0) return 0;
    snprintf(full + size, sizeof full - size, "/%s", path);
    return below_folder(full);
}

static int watched_fd(int fd, char *name, size_t room) {
    char link[64];
    if (mode == OFF || fd < 3) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, name, room - 1);
    if (size < 0) return 0;
    name[size] = 0;
    return below_folder(name);
}

/* What is to happen to this operation: OFF, KILL_HALFWAY or SHORT (of a write), FAIL with errno set. */
static int fate(const char *operation, const char *path, int writes) {
    long now = ++done;
    if (mode == COUNT) {
        if (trace_fd >= 0) dprintf(trace_fd, "%s %s\n", operation, path);
        return OFF;
    }
    if (mode == FAIL_ON ? now < at || !writes : now != at) return OFF;
    if (mode == KILL || (mode == KILL_HALFWAY && strcmp(operation, "write"))) raise(SIGKILL);
    if (mode == FAIL || mode == FAIL_ON) errno = error_number;
    return mode == FAIL_ON ? FAIL : mode;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, first, call, dir)                                                                        \
    int name first {                                                                                        \
        mode_t permission = 0;                                                                              \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                \
            va_list rest;                                                                                   \
            va_start(rest, flags);                                                                          \
            permission = va_arg(rest, mode_t);                                                              \
            va_end(rest);                                                                                   \
        }                                                                                                   \
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                                       \
        if (watched(dir, path) && fate(writes ? "create" : "open", path, writes) == FAIL) return -1;        \
        return REAL(name) call;                                                                             \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, permission), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, permission), AT_FDCWD)
OPEN(openat, (int dir, const char *path, int flags, ...), (dir, path, flags, permission), dir)
OPEN(openat64, (int dir, const char *path, int flags, ...), (dir, path, flags, permission), dir)

/* What needs room on the disk fails from there on when that is full; what frees some does not. */
#define ON_PATH(name, first, call, dir, path, room)                                                         \
    int name first { return watched(dir, path) && fate(#name, path, room) == FAIL ? -1 : REAL(name) call; }
ON_PATH(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 1)
ON_PATH(link, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(symlink, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD, path, 0)
ON_PATH(unlinkat, (int dir, const char *path, int flags), (dir, path, flags), dir, path, 0)
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
ON_PATH(mkdir, (const char *path, mode_t permission), (path, permission), AT_FDCWD, path, 1)
ON_PATH(mkdirat, (int dir, const char *path, mode_t permission), (dir, path, permission), dir, path, 1)
ON_PATH(chmod, (const char *path, mode_t permission), (path, permission), AT_FDCWD, path, 0)
ON_PATH(fchmodat, (int dir, const char *path, mode_t permission, int flags), (dir, path, permission, flags), dir, path, 0)

#define ON_FD(name, first, call, room)                                                                            \
    int name first {                                                                                        \
        char path[4096];                                                                                    \
        return watched_fd(fd, path, sizeof path) && fate(#name, path, room) == FAIL ? -1 : REAL(name) call; \
    }
ON_FD(fsync, (int fd), (fd), 1)
ON_FD(fdatasync, (int fd), (fd), 1)
ON_FD(fchmod, (int fd, mode_t permission), (fd, permission), 0)
ON_FD(ftruncate, (int fd, off_t size), (fd, size), 1)
ON_FD(ftruncate64, (int fd, off64_t size), (fd, size), 1)

int close(int fd) {
    char path[4096];
    int failed = watched_fd(fd, path, sizeof path) && fate("close", path, 0) == FAIL;
    int number = errno, result = REAL(close)(fd); /* the descriptor is gone even if closing fails */
    if (failed) errno = number;
    return failed ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[4096];
    int what = watched_fd(fd, path, sizeof path) ? fate("write", path, 1) : OFF;
    if (what == FAIL) return -1;
    if (what == SHORT || what == KILL_HALFWAY) size = (size + 1) / 2;
    ssize_t written = REAL(write)(fd, data, size);
    if (what == KILL_HALFWAY) raise(SIGKILL);
    return written;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[4096];
    return watched_fd(fd, path, sizeof path) && fate("writev", path, 1) == FAIL ? -1 : REAL(writev)(fd, parts, count);
}

ssize_t read(int fd, void *data, size_t size) {
    char path[4096];
    return watched_fd(fd, path, sizeof path) && fate("read", path, 0) == FAIL ? -1 : REAL(read)(fd, data, size);
}

#define FOPEN(name)                                                                                         \
    FILE *name(const char *path, const char *how) {                                                         \
        int writes = !!strpbrk(how, "wa+");                                                                 \
        int failed = watched(AT_FDCWD, path) && fate(writes ? "create" : "open", path, writes) == FAIL;     \
        return failed ? NULL : REAL(name)(path, how);                                                       \
    }
FOPEN(fopen)
FOPEN(fopen64)
