/* Faults put into the C core, one by one, to see that the sanitizers find them: -include this file, -DINJECT_<FAULT>. */
#include "_core.h"

#ifdef INJECT_OVERFLOW /* every block is 8 bytes too short */
#undef PyMem_Malloc
#define PyMem_Malloc(size) PyMem_Malloc((size) - 8)
#endif

#ifdef INJECT_LEAK /* no block is given back */
#undef PyMem_Free
#define PyMem_Free(block) ((void)(block))
#endif

#ifdef INJECT_INDEX /* an index past the end of an array */
static volatile int past_the_end = 2;

static inline int indexed(const lbx_words *w)
{
    int64_t v[2] = {w->num_running, w->num_waiting};

    return v[past_the_end] != INT64_MIN && lbx_words_valid(w);
}
#define lbx_words_valid(w) indexed(w)
#endif

#ifdef INJECT_RACE /* a publish lets others run, and its stores are plain */
static inline void plain_publish(lbx_segment *s, const lbx_words *v)
{
    Py_BEGIN_ALLOW_THREADS
    s->a = *v;
    Py_END_ALLOW_THREADS
}
#define lbx_publish(s, v) plain_publish((s), (v))
#endif
