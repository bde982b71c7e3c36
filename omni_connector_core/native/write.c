/* A frame, copied into memory. */
#include "native.h"

PyObject *native_write(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *head, *sources;
    Py_buffer to;
    if (nargs != 3 || !PyBytes_Check(head = args[0]) || !PyList_Check(sources = args[1]))
        return PyErr_Format(PyExc_TypeError, "write(head, sources, dest)");
    Py_ssize_t count = PyList_GET_SIZE(sources), at = PyBytes_GET_SIZE(head);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *origin = PyTuple_GET_ITEM(PyList_GET_ITEM(sources, i), 0);
        if (!PyLong_CheckExact(origin) && !PyBytes_CheckExact(origin))
            Py_RETURN_FALSE;
        at += PADDED(PyLong_AsSsize_t(PyTuple_GET_ITEM(PyList_GET_ITEM(sources, i), 1)));
    }
    if (PyObject_GetBuffer(args[2], &to, PyBUF_WRITABLE)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (to.len < at) {
        PyBuffer_Release(&to);
        Py_RETURN_FALSE;
    }
    char *dest = to.buf;
    Py_INCREF(sources);
    memcpy(dest, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head));
    dest += PyBytes_GET_SIZE(head);
    for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(sources); i++) {
        PyObject *source = Py_NewRef(PyList_GET_ITEM(sources, i));
        PyObject *origin = PyTuple_GET_ITEM(source, 0);
        Py_ssize_t nbytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(source, 1));
        if (nbytes)
            copy(dest, PyLong_CheckExact(origin) ? PyLong_AsVoidPtr(origin) : PyBytes_AS_STRING(origin), nbytes);
        dest += PADDED(nbytes);
        Py_DECREF(source);
    }
    Py_DECREF(sources);
    PyBuffer_Release(&to);
    Py_RETURN_TRUE;
}
