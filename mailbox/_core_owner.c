/* A forked child is no owner, also when C code forks: the handler closes the lock's descriptor there, and does nothing else. */
#include "_core.h"

#include <pthread.h>
#include <unistd.h>

static owner *owners;
static pthread_mutex_t owners_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t atfork_once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&owners_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&owners_lock); }

static void after_fork_in_child(void)
{
    owner *o;

    for (o = owners; o != NULL; o = o->next) {
        close(o->lock_fd); /* the parent's description stays locked: it has a descriptor of it, too */
        o->lock_fd = -1;
        o->status = FORKED;
    }
    owners = NULL;
    pthread_mutex_init(&owners_lock, NULL);
}

static void register_atfork(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

void owner_enlist(owner *o)
{
    pthread_once(&atfork_once, register_atfork);
    pthread_mutex_lock(&owners_lock);
    o->prev = NULL;
    o->next = owners;
    if (owners != NULL)
        owners->prev = o;
    owners = o;
    pthread_mutex_unlock(&owners_lock);
}

int owner_delist(owner *o)
{
    int fd;

    pthread_mutex_lock(&owners_lock);
    fd = o->lock_fd;
    if (fd >= 0) {
        if (o->prev != NULL)
            o->prev->next = o->next;
        else
            owners = o->next;
        if (o->next != NULL)
            o->next->prev = o->prev;
        o->lock_fd = -1;
    }
    pthread_mutex_unlock(&owners_lock);
    return fd;
}
