/* A fault put into the reader's C core, to see that the sanitizers find it: -include this file, -DINJECT_OVERFLOW. */
#include <Python.h>

#ifdef INJECT_OVERFLOW /* every block is 8 bytes too short */
#undef PyMem_Malloc
#define PyMem_Malloc(size) PyMem_Malloc((size) - 8)
#endif
