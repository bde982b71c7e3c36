/* One call for what takes Python several: a producer and a consumer each ask one of these for every payload. */
#include "native.h"
#include <poll.h>
#include <sys/stat.h>

/* The address of a contiguous buffer's bytes, which the caller keeps. */
PyObject *native_address(PyObject *module, PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE))
        return NULL;
    void *address = view.buf;
    PyBuffer_Release(&view);
    return PyLong_FromVoidPtr(address);
}

/* Whether a read of a descriptor would not wait. */
PyObject *native_readable(PyObject *module, PyObject *fd)
{
    struct pollfd asked = {.fd = PyObject_AsFileDescriptor(fd), .events = POLLIN};
    if (asked.fd < 0)
        return NULL;
    int found = poll(&asked, 1, 0);
    return found < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBool_FromLong(found);
}

/* When a file of that name was modified, in ns. */
PyObject *native_modified_ns(PyObject *module, PyObject *path)
{
    struct stat status;
    const char *name = PyUnicode_AsUTF8(path);
    if (!name)
        return NULL;
    if (stat(name, &status))
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLongLong(status.st_mtim.tv_sec * 1000000000ll + status.st_mtim.tv_nsec);
}
