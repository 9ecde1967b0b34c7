/* Has a name come or gone since the last look?  The twin of _watch_py.py, where the reasons stand. */
#include "_core.h"

#include <sys/stat.h>

#define SETTLED_NS 20000000

static int64_t ns_of(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

uint64_t watch_generation(watch *w)
{
    struct stat found;
    int64_t before, changed_ns, touched_ns;

    if (w->asked)
        return w->generation;
    w->asked = 1;
    before = clock_ns(CLOCK_REALTIME_COARSE); /* before the stat: whatever changes after it is not stamped earlier */
    if (stat("/dev/shm", &found) == -1) {
        w->settled = 0;
        return ++w->generation;
    }
    changed_ns = ns_of(found.st_mtim);
    touched_ns = ns_of(found.st_ctim);
    if (!w->settled || found.st_dev != w->dev || found.st_ino != w->ino || changed_ns != w->changed_ns || touched_ns != w->touched_ns)
        w->generation++;
    w->dev = found.st_dev;
    w->ino = found.st_ino;
    w->changed_ns = changed_ns;
    w->touched_ns = touched_ns;
    w->settled = before - changed_ns > SETTLED_NS && before - touched_ns > SETTLED_NS;
    return w->generation;
}
