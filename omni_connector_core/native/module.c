/* The short way through the codec: payloads of dicts, lists, tuples, atoms, tensors and arrays, in C.
 *
 * It only ever says yes. Whatever it does not know, finds odd or cannot do gives PASS, without an error and without a
 * trace, and the Python beside it decides: what is a type, a fault, a message. So this file holds no rules of its own;
 * where the two know a payload, the bytes are the same (tests/test_native_codec.py).
 *
 * Why it exists: a stage's caches belong to its model, so Python is cold when a payload comes by, and each call of it
 * then costs about 2 us. Encoding a dict with a tensor: 37 us in Python after 48 MB went through the caches, 4 us hot.
 *
 * Tensors come and go by DLPack's exchange API, arrays by the buffer protocol: it is compiled against neither.
 */
#include "native.h"

PyObject *PASS, *crc32_function, *dtype_name, *is_neg_name;
PyTypeObject *tensor_type;
const DLExchange *torch_api;
struct tensor_dtype tensor_dtypes[TENSOR_DTYPES];
PyTypeObject *array_type;
PyObject *frombuffer;
struct array_dtype array_dtypes[ARRAY_DTYPES];

PyObject *passed(void)
{
    if (PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) || PyErr_ExceptionMatches(PyExc_MemoryError))
            return NULL;
        PyErr_Clear();
    }
    return Py_NewRef(PASS);
}

/* CRC-32 of a head. Of a short one by half bytes: a table of one cache line. */
int head_sum(const uint8_t *at, Py_ssize_t nbytes, uint32_t *sum)
{
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c };
    if (nbytes <= 1024) {
        uint32_t crc = ~0u;
        for (Py_ssize_t i = 0; i < nbytes; i++) {
            crc ^= at[i];
            crc = (crc >> 4) ^ table[crc & 15];
            crc = (crc >> 4) ^ table[crc & 15];
        }
        *sum = ~crc;
        return 0;
    }
    PyObject *view = PyMemoryView_FromMemory((char *)at, nbytes, PyBUF_READ);
    PyObject *found = view ? PyObject_CallOneArg(crc32_function, view) : NULL;
    Py_XDECREF(view);
    if (!found)
        return -1;
    *sum = (uint32_t)PyLong_AsUnsignedLongMask(found);
    Py_DECREF(found);
    return 0;
}

static PyObject *native_use_torch(PyObject *module, PyObject *args)
{
    PyObject *kind, *capsule, *dtypes;
    if (!PyArg_ParseTuple(args, "O!OO!", &PyType_Type, &kind, &capsule, &PyTuple_Type, &dtypes))
        return NULL;
    const DLExchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api)
        return NULL;
    if (api->major != 1 || PyTuple_GET_SIZE(dtypes) > TENSOR_DTYPES)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes); i++) {
        PyObject *object;
        DLDataType dl = {.lanes = 1};
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(dtypes, i), "Obb", &object, &dl.code, &dl.bits))
            return NULL;
        tensor_dtypes[i].object = object == Py_None ? NULL : Py_NewRef(object);
        tensor_dtypes[i].dl = dl;
    }
    torch_api = api;
    tensor_type = (PyTypeObject *)Py_NewRef(kind);
    Py_RETURN_TRUE;
}

static PyObject *native_use_numpy(PyObject *module, PyObject *args)
{
    PyObject *kind, *dtypes, *function;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyType_Type, &kind, &PyTuple_Type, &dtypes, &function))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes) && i < ARRAY_DTYPES; i++) {
        PyObject *object;
        int letter;
        struct array_dtype *dtype = &array_dtypes[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(dtypes, i), "OCb", &object, &letter, &dtype->nbytes))
            return NULL;
        dtype->object = Py_NewRef(object);
        dtype->letter = same_letter((char)letter);
    }
    frombuffer = Py_NewRef(function);
    array_type = (PyTypeObject *)Py_NewRef(kind);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"encode", native_encode, METH_O, NULL},
    {"write", (PyCFunction)(void (*)(void))native_write, METH_FASTCALL, NULL},
    {"decode", native_decode, METH_O, NULL},
    {"address", native_address, METH_O, NULL},
    {"readable", native_readable, METH_O, NULL},
    {"modified_ns", native_modified_ns, METH_O, NULL},
    {"use_torch", native_use_torch, METH_VARARGS, NULL},
    {"use_numpy", native_use_numpy, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The short way through the codec; see native/module.c.", -1, methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *zlib = PyImport_ImportModule("zlib"), *module = PyModule_Create(&definition);
    crc32_function = zlib ? PyObject_GetAttrString(zlib, "crc32") : NULL;
    dtype_name = PyUnicode_InternFromString("dtype");
    is_neg_name = PyUnicode_InternFromString("is_neg");
    PASS = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    Py_XDECREF(zlib);
    if (!module || !crc32_function || !dtype_name || !is_neg_name || !PASS)
        return NULL;
    if (PyModule_AddObjectRef(module, "PASS", PASS))
        return NULL;
    return module;
}
