/* The C core: a thin binding of loadbox.h for CPython 3.10 to 3.13.  Its twin is _seqlock_py.py. */
#include "_core.h"

core_names core;

#ifdef LBX_KILL_POINTS
/* A test build: the process kills or stops itself at the n-th step that it takes after _kill_at(n) or _stop_at(n). */
#include <signal.h>

static long steps_left = -1;
static int at_step = SIGKILL;

void lbx_kill_point(void)
{
    if (steps_left >= 0 && steps_left-- == 0)
        raise(at_step); /* taken by this thread before raise() returns */
}

static PyObject *arm(PyObject *arg, int signal)
{
    long steps = PyLong_AsLong(arg);

    if (steps == -1 && PyErr_Occurred())
        return NULL;
    at_step = signal;
    steps_left = steps;
    Py_RETURN_NONE;
}

static PyObject *kill_at(PyObject *Py_UNUSED(module), PyObject *arg) { return arm(arg, SIGKILL); }
static PyObject *stop_at(PyObject *Py_UNUSED(module), PyObject *arg) { return arm(arg, SIGSTOP); }

static PyMethodDef functions[] = {
    {"_kill_at", kill_at, METH_O, "Die at the n-th step from now, counted from 0; -1: do not."},
    {"_stop_at", stop_at, METH_O, "As _kill_at, but stop, until SIGCONT."},
    {NULL, NULL, 0, NULL},
};
#else
static PyMethodDef functions[] = {{NULL, NULL, 0, NULL}};
#endif

PyObject *own_methods(PyTypeObject *type, PyMethodDef *methods)
{
    PyObject *found, *own;
    PyMethodDef *m;
    int inherited, failed;

    for (m = methods; m->ml_name != NULL; m++) {
        if (m->ml_flags & METH_CLASS)
            continue;
        found = PyObject_GetAttrString((PyObject *)type, m->ml_name);
        if (found == NULL)
            return NULL;
        inherited = Py_IS_TYPE(found, &PyMethodDescr_Type) && ((PyMethodDescrObject *)found)->d_method == m;
        Py_DECREF(found);
        if (!inherited)
            continue;
        own = PyDescr_NewMethod(type, m);
        if (own == NULL)
            return NULL;
        failed = PyObject_SetAttrString((PyObject *)type, m->ml_name, own);
        Py_DECREF(own);
        if (failed)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *name_from(const char *module, const char *name)
{
    PyObject *found = PyImport_ImportModule(module), *value = NULL;

    if (found != NULL)
        value = PyObject_GetAttrString(found, name);
    Py_XDECREF(found);
    return value;
}

static int take_names(void)
{
    PyObject *states, *snapshot, *deque;
    struct timespec tick = {0, 0};
    int i;

    clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
    core.tick_ns = (int64_t)tick.tv_sec * 1000000000 + tick.tv_nsec;
    core.mailbox_error = name_from("loadbox.mailbox._errors", "MailboxError");
    core.check_load = name_from("loadbox.mailbox._check", "check_load");
    snapshot = name_from("loadbox.mailbox._types", "LoadSnapshot");
    states = name_from("loadbox.mailbox._types", "RankState");
    deque = name_from("collections", "deque");
    if (core.mailbox_error == NULL || core.check_load == NULL || snapshot == NULL || states == NULL || deque == NULL)
        return -1;
    core.snapshot = (PyTypeObject *)snapshot;
    core.deque = (PyTypeObject *)deque;
    for (i = 0; i < STATES; i++) {
        core.states[i] = PyObject_CallFunction(states, "i", i);
        if (core.states[i] == NULL)
            return -1;
    }
    Py_DECREF(states);
    return 0;
}

static int exec_module(PyObject *module)
{
    if (take_names() < 0)
        return -1;
    if (PyModule_AddType(module, &writer_type) < 0 || PyModule_AddType(module, &reader_type) < 0
        || PyModule_AddType(module, &group_type) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, exec_module},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "loadbox.mailbox._seqlock_c",
    .m_doc = "The C core of loadbox's mailbox.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__seqlock_c(void) { return PyModuleDef_Init(&definition); }
