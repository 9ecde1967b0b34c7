/* The reader's C core: filling a view, and the cold-set rule over it.
 *
 * Two functions over tables of int64 that Python owns (_view.py); _core_py.py is the twin, and the tests hold the decisions of the
 * two together.  Neither takes a lock: LoadReader's serialises all that touches one view.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* ---- the tables --------------------------------------------------------------------------------------------------------- */

#define VIEW_COLUMNS(X)                                                                                                          \
    X(running) X(waiting) X(kv_active) X(kv_total) X(reported_ns) X(in_flight) X(owed) X(unseen) X(own) X(usable) X(mailbox)      \
    X(allowed)
#define INPUT_COLUMNS(X)                                                                                                         \
    X(epoch) X(state) X(same_clock) X(published_ns) X(bound_ns) X(available) X(pig_running) X(pig_waiting) X(pig_active)          \
    X(pig_total) X(pig_ns) X(unseen) X(oldest_ns) X(next_seen) X(report_ns) X(others_owed)

#define WORD(name) int64_t name;
typedef struct {
    VIEW_COLUMNS(WORD)
} shown;

typedef struct {
    INPUT_COLUMNS(WORD)
} input;

typedef struct { /* a row of GroupReader */
    int64_t num_running, num_waiting, kv_active_pages, kv_total_pages, published_ns, epoch;
    int32_t rank;
    int8_t state;
    uint8_t usable;
    uint8_t pad[2];
} row;

_Static_assert(sizeof(row) == 56, "GroupReader's itemsize");

enum { LIVE = 2, CHANGED = 1, SEEN = 2, RANK_SHIFT = 2, FIRST_TOKEN_WEIGHT = 3, BLOCK = 256 };

#define NEVER_NS (-(INT64_C(1) << 62))
#define COUNT_LIMIT (INT64_C(1) << 32)
#define AGE_LIMIT_NS INT64_C(500000000)

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- filling the view --------------------------------------------------------------------------------------------------- */

/* What the mailbox of a rank says, and since when it can have been so. */
static void take_mailbox(shown *v, input *s, const row *r, int64_t now_ns, int64_t last_ns)
{
    if (r->published_ns != s->published_ns) {
        if (s->same_clock && r->published_ns <= now_ns)
            s->bound_ns = r->published_ns;
        else
            s->bound_ns = s->published_ns ? last_ns : NEVER_NS;
        s->published_ns = r->published_ns;
    }
    v->running = r->num_running;
    v->waiting = r->num_waiting;
    v->kv_active = r->kv_active_pages;
    v->kv_total = r->kv_total_pages;
    v->reported_ns = s->bound_ns;
    v->usable = r->state == LIVE;
    v->mailbox = 1;
}

static void take_piggyback(shown *v, const input *s)
{
    v->running = s->pig_running;
    v->waiting = s->pig_waiting;
    v->kv_active = s->pig_active;
    v->kv_total = s->pig_total;
    v->reported_ns = s->pig_ns;
    v->usable = 1;
    v->mailbox = 0;
}

static void take_nothing(shown *v)
{
    v->running = v->waiting = v->kv_active = v->kv_total = v->usable = v->mailbox = 0;
    v->reported_ns = NEVER_NS;
}

/* What the other frontends have at a rank. */
typedef struct {
    int64_t in_flight, owed;
} sum;

static int merge_rank(shown *v, input *s, const row *r, uint64_t mine, sum others, int64_t now_ns, int64_t last_ns)
{
    const int64_t own = (uint32_t)mine, theirs = others.owed;

    if (r->epoch != s->epoch || (uint8_t)r->state != s->state)
        return CHANGED;
    if (r->usable)
        take_mailbox(v, s, r, now_ns, last_ns);
    else if (s->pig_total)
        take_piggyback(v, s);
    else
        take_nothing(v);
    if (v->reported_ns != s->report_ns || theirs < s->others_owed) {
        s->report_ns = v->reported_ns;
        s->others_owed = theirs;
    }
    v->in_flight = own + others.in_flight;
    v->owed = (int64_t)(mine >> 32) + theirs;
    v->unseen = s->unseen + theirs - s->others_owed;
    v->own = own;
    v->allowed = s->available;
    return s->unseen && s->oldest_ns <= v->reported_ns ? SEEN : 0;
}

/* Words of a board change while they are read, each by one store; no invariant spans them. */
static uint64_t word(const Py_buffer *board, Py_ssize_t rank)
{
    return __atomic_load_n((const uint64_t *)board->buf + rank, __ATOMIC_RELAXED);
}

static int add_board(PyObject *board, sum *sums, Py_ssize_t first, Py_ssize_t count)
{
    Py_buffer words;
    Py_ssize_t i;

    if (PyObject_GetBuffer(board, &words, PyBUF_SIMPLE) == -1)
        return -1;
    count = least(count, words.len / 8 - first);
    for (i = 0; i < count; i++) {
        const uint64_t w = word(&words, first + i);

        sums[i].in_flight += (uint32_t)w;
        sums[i].owed += (int64_t)(w >> 32);
    }
    PyBuffer_Release(&words);
    return 0;
}

static long merge_all(const Py_buffer *view, const Py_buffer *inputs, const Py_buffer *rows, const Py_buffer *own, PyObject *boards,
                     int64_t now_ns, int64_t last_ns)
{
    const Py_ssize_t n = view->len / (Py_ssize_t)sizeof(shown), others = PyList_GET_SIZE(boards);
    input *const s = inputs->buf;
    sum sums[BLOCK];
    Py_ssize_t first, i, board, last = -1;
    long result = 0;

    for (first = 0; first < n; first += BLOCK) {
        const Py_ssize_t count = least(n - first, BLOCK);

        memset(sums, 0, (size_t)count * sizeof *sums);
        for (board = 0; board < others; board++)
            if (add_board(PyList_GET_ITEM(boards, board), sums, first, count) < 0)
                return -1;
        for (i = first; i < first + count; i++) {
            const int flags = merge_rank((shown *)view->buf + i, &s[i], (const row *)rows->buf + i, word(own, i), sums[i - first],
                                         now_ns, last_ns);

            result |= flags;
            if (flags & SEEN) {
                if (last < 0)
                    result |= (long)i << RANK_SHIFT;
                else
                    s[last].next_seen = i;
                s[i].next_seen = -1;
                last = i;
            }
        }
    }
    return result;
}

PyDoc_STRVAR(merge_doc,
"merge($module, view, inputs, rows, own, boards, now_ns, last_ns, /)\n--\n\n"
"Fill the view from what is known; see ``_core_py.merge``.");

static PyObject *merge(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Py_buffer buffers[4];
    int64_t now_ns, last_ns;
    Py_ssize_t ranks;
    long flags = -1;
    int taken;

    (void)module;
    if (n != 7)
        return PyErr_Format(PyExc_TypeError, "merge() takes 7 arguments, %zd given", n);
    if (!PyList_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "boards must be a list");
    now_ns = PyLong_AsLongLong(args[5]);
    last_ns = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    for (taken = 0; taken < 4; taken++)
        if (PyObject_GetBuffer(args[taken], &buffers[taken], taken < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) == -1)
            goto done;
    ranks = buffers[0].len / (Py_ssize_t)sizeof(shown);
    if (buffers[1].len < ranks * (Py_ssize_t)sizeof(input) || buffers[2].len < ranks * (Py_ssize_t)sizeof(row)
        || buffers[3].len < ranks * 8)
        PyErr_Format(PyExc_ValueError, "a table is too short for %zd ranks", ranks);
    else
        flags = merge_all(&buffers[0], &buffers[1], &buffers[2], &buffers[3], args[4], now_ns, last_ns);
done:
    while (taken-- > 0)
        PyBuffer_Release(&buffers[taken]);
    return flags < 0 ? NULL : PyLong_FromLong(flags);
}

/* ---- the rule ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t *loads; /* of all ranks */
    int64_t *spare; /* as many words, to sort in */
    Py_ssize_t cold_ranks;
} judged;

static int64_t weight(const shown *v) { return v->in_flight + FIRST_TOKEN_WEIGHT * v->owed; }

static void judge(judged *j, const shown *view, Py_ssize_t n, int64_t now_ns, double own_rate)
{
    int64_t known = 0, foreign = 0, reported = 0, visible = 0, own = 0, age = 0;
    Py_ssize_t i;

    for (i = 0; i < n; i++) {
        const shown *v = &view[i];
        const int64_t running = least(v->running, COUNT_LIMIT), waiting = least(v->waiting, COUNT_LIMIT);
        const int64_t queued = running + waiting, late = waiting + (v->usable ? v->unseen : 0);

        j->loads[i] = most(v->in_flight, running + late) + FIRST_TOKEN_WEIGHT * most(v->owed, late);
        if (!v->usable)
            continue;
        known++;
        foreign += j->loads[i] - weight(v);
        reported += queued;
        visible += v->in_flight;
        own += v->own;
        if (queued || !v->mailbox) /* a report from the future says nothing of its age */
            age += v->reported_ns <= now_ns ? least(now_ns - v->reported_ns, AGE_LIMIT_NS) : AGE_LIMIT_NS;
    }
    if (known && known < n) {
        const int64_t presumed = 1 + (foreign + known - 1) / known;

        for (i = 0; i < n; i++)
            j->loads[i] += view[i].usable ? 0 : presumed;
    }
    j->cold_ranks = 1;
    if (own && reported > visible) {
        /* The same steps as the twin's, so that no digit differs. */
        const double unseen = 2.0 * ((double)(reported - visible) / (double)own) * own_rate * ((double)age / (double)known / 1e9);

        j->cold_ranks = unseen < (double)n ? 1 + (Py_ssize_t)unseen : n;
    }
}

/* The k-th smallest, k from 0 on; the array is left in another order. */
static int64_t kth(int64_t *a, Py_ssize_t n, Py_ssize_t k)
{
    Py_ssize_t low = 0, high = n - 1;

    while (low < high) {
        const int64_t pivot = a[low + (high - low) / 2];
        Py_ssize_t i = low, j = high;

        while (i <= j) {
            while (a[i] < pivot)
                i++;
            while (a[j] > pivot)
                j--;
            if (i <= j) {
                const int64_t other = a[i];
                a[i++] = a[j];
                a[j--] = other;
            }
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            break;
    }
    return a[k];
}

/* The largest load that is cold; -1 if no rank is allowed. */
static int64_t edge(const judged *j, const shown *view, Py_ssize_t n)
{
    Py_ssize_t i, candidates = 0;
    int64_t lowest = INT64_MAX;

    for (i = 0; i < n; i++)
        if (view[i].allowed) {
            j->spare[candidates++] = j->loads[i];
            lowest = least(lowest, j->loads[i]);
        }
    if (candidates == 0)
        return -1;
    return j->cold_ranks == 1 ? lowest : kth(j->spare, candidates, least(j->cold_ranks, candidates) - 1);
}

static Py_ssize_t pick(const judged *j, const shown *view, Py_ssize_t n, double first, double second)
{
    const int64_t limit = edge(j, view, n);
    int64_t best = INT64_MAX;
    Py_ssize_t i, ties = 0, one, other, a = -1, b = -1;

    for (i = 0; i < n; i++)
        if (view[i].allowed && j->loads[i] <= limit) {
            const int64_t w = weight(&view[i]);

            if (w < best) {
                best = w;
                ties = 0;
            }
            if (w == best)
                j->spare[ties++] = i;
        }
    if (ties <= 1)
        return ties ? (Py_ssize_t)j->spare[0] : -1;
    one = (Py_ssize_t)(first * (double)ties);
    other = (Py_ssize_t)(second * (double)(ties - 1));
    other += other >= one;
    a = (Py_ssize_t)j->spare[one];
    b = (Py_ssize_t)j->spare[other];
    return j->loads[a] <= j->loads[b] ? a : b;
}

PyDoc_STRVAR(cold_set_doc,
"cold_set($module, view, now_ns, own_rate, first, second, /)\n--\n\n"
"Choose by the rule of ``_cold_set.py``; ``first`` and ``second``, 0 <= x < 1, draw the two ties.  -1: no rank is allowed.");

static PyObject *cold_set(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t room[2 * BLOCK], now_ns;
    double own_rate, first, second;
    Py_buffer view;
    Py_ssize_t n, rank = -1;
    judged j;

    (void)module;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "cold_set() takes 5 arguments, %zd given", count);
    now_ns = PyLong_AsLongLong(args[1]);
    own_rate = PyFloat_AsDouble(args[2]);
    first = PyFloat_AsDouble(args[3]);
    second = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (!(first >= 0.0 && first < 1.0 && second >= 0.0 && second < 1.0))
        return PyErr_Format(PyExc_ValueError, "the draws must be 0 or more and less than 1");
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) == -1)
        return NULL;
    n = view.len / (Py_ssize_t)sizeof(shown);
    j.loads = n <= BLOCK ? room : PyMem_Malloc((size_t)n * 2 * sizeof *j.loads);
    if (j.loads != NULL) {
        j.spare = j.loads + n;
        judge(&j, view.buf, n, now_ns, own_rate);
        rank = pick(&j, view.buf, n, first, second);
        if (j.loads != room)
            PyMem_Free(j.loads);
    }
    PyBuffer_Release(&view);
    return j.loads == NULL ? PyErr_NoMemory() : PyLong_FromSsize_t(rank);
}

/* ---- the module --------------------------------------------------------------------------------------------------------- */

static int add_names(PyObject *module, const char *attribute, const char *const *names, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n), *name;
    Py_ssize_t i;
    int result;

    for (i = 0; tuple != NULL && i < n; i++) {
        name = PyUnicode_FromString(names[i]);
        if (name == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, name);
    }
    if (tuple == NULL)
        return -1;
    result = PyModule_AddObjectRef(module, attribute, tuple);
    Py_DECREF(tuple);
    return result;
}

static int module_exec(PyObject *module)
{
#define NAME(name) #name,
    static const char *const view[] = {VIEW_COLUMNS(NAME)}, *const inputs[] = {INPUT_COLUMNS(NAME)};

    if (add_names(module, "view_columns", view, sizeof view / sizeof *view) < 0)
        return -1;
    return add_names(module, "input_columns", inputs, sizeof inputs / sizeof *inputs);
}

static PyMethodDef methods[] = {
    {"merge", (PyCFunction)(void (*)(void))merge, METH_FASTCALL, merge_doc},
    {"cold_set", (PyCFunction)(void (*)(void))cold_set, METH_FASTCALL, cold_set_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_core_c",
    .m_doc = "The reader's C core; see _core_py.py.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core_c(void);
PyMODINIT_FUNC PyInit__core_c(void) { return PyModuleDef_Init(&definition); }
