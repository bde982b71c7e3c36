/* A payload's head, and where its large bytes lie. */
#include "native.h"

typedef struct {
    uint8_t *data, here[768];
    Py_ssize_t nbytes, room;
    PyObject *sources;
} Writer;

/* Every function that writes returns 0, or -1 for "not mine", in which case an exception may or may not be set. */

static uint8_t *grow(Writer *w, Py_ssize_t nbytes)
{
    if (w->nbytes + nbytes > w->room) {
        Py_ssize_t room = 2 * w->room + nbytes;
        uint8_t *data = PyMem_Malloc(room);
        if (!data)
            return NULL;
        memcpy(data, w->data, w->nbytes);
        if (w->data != w->here)
            PyMem_Free(w->data);
        w->data = data;
        w->room = room;
    }
    uint8_t *at = w->data + w->nbytes;
    w->nbytes += nbytes;
    return at;
}

static void big_endian(uint8_t *at, uint64_t value, int nbytes)
{
    for (int i = nbytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
}

/* A msgpack tag with a value of 1, 2, 4 or 8 bytes behind it. */
static int tagged(Writer *w, uint8_t tag, uint64_t value, int nbytes)
{
    uint8_t *at = grow(w, 1 + nbytes);
    if (!at)
        return -1;
    at[0] = tag;
    big_endian(at + 1, value, nbytes);
    return 0;
}

/* The head of something counted: a tag that holds a small count, else a tag for 8 (if there is one), 16 or 32 bits. */
static int counted(Writer *w, Py_ssize_t count, uint8_t fix, int fix_limit, uint8_t tag8, uint8_t tag16)
{
    if (count < fix_limit)
        return tagged(w, fix | (uint8_t)count, 0, 0);
    if (tag8 && count < 256)
        return tagged(w, tag8, count, 1);
    if (count < 65536)
        return tagged(w, tag16, count, 2);
    return count >> 32 ? -1 : tagged(w, tag16 + 1, count, 4);
}

static int put_raw(Writer *w, const char *data, Py_ssize_t nbytes)
{
    uint8_t *at = grow(w, nbytes);
    if (!at)
        return -1;
    memcpy(at, data, nbytes);
    return 0;
}

static int put_int(Writer *w, PyObject *value)
{
    int overflow;
    long long v = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow < 0)
        return -1;
    if (overflow > 0) {
        unsigned long long u = PyLong_AsUnsignedLongLong(value);
        return PyErr_Occurred() ? -1 : tagged(w, 0xcf, u, 8);
    }
    if (v >= 0) {
        if (v < 128)
            return tagged(w, (uint8_t)v, 0, 0);
        if (v < 256)
            return tagged(w, 0xcc, v, 1);
        if (v < 65536)
            return tagged(w, 0xcd, v, 2);
        return v >> 32 ? tagged(w, 0xcf, v, 8) : tagged(w, 0xce, v, 4);
    }
    if (v >= -32)
        return tagged(w, (uint8_t)v, 0, 0);
    if (v >= -128)
        return tagged(w, 0xd0, v, 1);
    if (v >= -32768)
        return tagged(w, 0xd1, v, 2);
    return v >= INT32_MIN ? tagged(w, 0xd2, v, 4) : tagged(w, 0xd3, v, 8);
}

static int put_float(Writer *w, PyObject *value)
{
    double v = PyFloat_AS_DOUBLE(value);
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return tagged(w, 0xcb, bits, 8);
}

static int put_str(Writer *w, PyObject *value)
{
    Py_ssize_t nbytes;
    const char *data = PyUnicode_AsUTF8AndSize(value, &nbytes);
    if (!data || counted(w, nbytes, 0xa0, 32, 0xd9, 0xda))
        return -1;
    return put_raw(w, data, nbytes);
}

/* An Ext of kind code and nbytes bytes; they are written at *at. */
static int put_ext(Writer *w, uint8_t code, Py_ssize_t nbytes, uint8_t **at)
{
    int power = nbytes == 1 ? 0 : nbytes == 2 ? 1 : nbytes == 4 ? 2 : nbytes == 8 ? 3 : nbytes == 16 ? 4 : -1;
    if (power >= 0 ? tagged(w, 0xd4 + power, 0, 0) : counted(w, nbytes, 0, 0, 0xc7, 0xc8))
        return -1;
    uint8_t *data = grow(w, 1 + nbytes);
    if (!data)
        return -1;
    data[0] = code;
    *at = data + 1;
    return 0;
}

/* Set bytes aside; steals origin. */
static int set_aside(Writer *w, PyObject *origin, Py_ssize_t nbytes, PyObject *owner, uint32_t *index)
{
    PyObject *length = PyLong_FromSsize_t(nbytes);
    PyObject *source = origin && length ? PyTuple_Pack(3, origin, length, owner) : NULL;
    Py_XDECREF(origin);
    Py_XDECREF(length);
    if (!source)
        return -1;
    *index = (uint32_t)PyList_GET_SIZE(w->sources);
    int failed = *index >= PIECES || PyList_Append(w->sources, source);
    Py_DECREF(source);
    return failed ? -1 : 0;
}

static int put_bytes(Writer *w, PyObject *value)
{
    Py_ssize_t nbytes = PyBytes_GET_SIZE(value);
    if (nbytes <= INLINE)
        return counted(w, nbytes, 0, 0, 0xc4, 0xc5) ? -1 : put_raw(w, PyBytes_AS_STRING(value), nbytes);
    uint32_t index;
    uint8_t *at;
    if (set_aside(w, Py_NewRef(value), nbytes, Py_None, &index) || put_ext(w, EXT_BYTES, 4, &at))
        return -1;
    put32(at, index);
    return 0;
}

static int put_head(Writer *w, uint8_t kind, uint8_t code, int ndim, const void *data, Py_ssize_t nbytes,
                    PyObject *owner, uint8_t **shape)
{
    uint32_t index;
    uint8_t *at;
    if ((nbytes && !data) || set_aside(w, PyLong_FromVoidPtr((void *)data), nbytes, owner, &index))
        return -1;
    if (put_ext(w, kind, 6 + 8 * ndim, &at))
        return -1;
    at[0] = code;
    at[1] = (uint8_t)ndim;
    put32(at + 2, index);
    *shape = at + 6;
    return 0;
}

static int put_tensor(Writer *w, PyObject *value)
{
    /* asked first: each question lets other threads run, and what is borrowed below is good only until they do */
    PyObject *negated = PyObject_CallMethodNoArgs(value, is_neg_name); /* a view whose signs are not in its memory */
    Py_XDECREF(negated);
    if (negated != Py_False)
        return -1;
    /* torch gives several of its dtypes, such as uint8 and uint1, one name in DLPack */
    PyObject *dtype = PyObject_GetAttr(value, dtype_name);
    Py_XDECREF(dtype);
    int code = 0;
    while (code < TENSOR_DTYPES && tensor_dtypes[code].object != dtype)
        code++;
    DLTensor t;
    if (!dtype || code == TENSOR_DTYPES || torch_api->borrow(value, &t))
        return -1;
    if (t.device != DL_CPU || t.ndim > MAX_NDIM || t.dtype.bits != tensor_dtypes[code].dl.bits)
        return -1;
    int64_t shape[MAX_NDIM], count = 1;
    for (int i = 0; i < t.ndim; i++)
        count *= shape[i] = t.shape[i];
    if (t.strides && count) {
        int64_t step = 1;
        for (int i = t.ndim - 1; i >= 0; step *= shape[i], i--)
            if (shape[i] != 1 && t.strides[i] != step)
                return -1;
    }
    uint8_t *at;
    const char *data = count ? (char *)t.data + t.byte_offset : "";
    if (put_head(w, EXT_TENSOR, (uint8_t)code, t.ndim, data, count * (t.dtype.bits / 8), value, &at))
        return -1;
    memcpy(at, shape, t.ndim * sizeof *shape);
    return 0;
}

static int put_array(Writer *w, PyObject *value)
{
    Py_buffer view;
    if (PyObject_GetBuffer(value, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS))
        return -1;
    int failed = -1, code = 1;
    char letter = view.format && view.format[0] && !view.format[1] ? same_letter(view.format[0]) : 0;
    while (code < ARRAY_DTYPES && !(array_dtypes[code].letter == letter && array_dtypes[code].nbytes == view.itemsize))
        code++;
    uint8_t *shape;
    if (letter && code < ARRAY_DTYPES && view.ndim <= MAX_NDIM
        && !put_head(w, EXT_NDARRAY, (uint8_t)code, view.ndim, view.len ? view.buf : "", view.len, value, &shape)) {
        for (int i = 0; i < view.ndim; i++)
            put64(shape + 8 * i, view.shape[i]);
        failed = 0;
    }
    PyBuffer_Release(&view);
    return failed;
}

static int put_value(Writer *w, PyObject *value, int depth);

static int put_items(Writer *w, PyObject *value, int depth)
{
    /* a tensor call lets other threads run, which may change a list */
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (count >= MIN_GROUP && tensor_type && Py_TYPE(PySequence_Fast_GET_ITEM(value, 0)) == tensor_type)
        return -1;
    if (counted(w, count, 0x90, 16, 0, 0xdc))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PySequence_Fast_GET_SIZE(value) != count)
            return -1;
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        int failed = put_value(w, item, depth + 1);
        Py_DECREF(item);
        if (failed)
            return -1;
    }
    return PySequence_Fast_GET_SIZE(value) == count ? 0 : -1;
}

static int put_tuple(Writer *w, PyObject *value, int depth)
{
    Writer part = {.room = sizeof part.here, .sources = w->sources};
    part.data = part.here;
    uint8_t *at;
    int failed = put_items(&part, value, depth) || put_ext(w, EXT_TUPLE, part.nbytes, &at);
    if (!failed)
        memcpy(at, part.data, part.nbytes);
    if (part.data != part.here)
        PyMem_Free(part.data);
    return failed ? -1 : 0;
}

static int put_dict(Writer *w, PyObject *value, int depth)
{
    Py_ssize_t count = PyDict_GET_SIZE(value), at = 0, seen = 0;
    PyObject *key, *item;
    if (counted(w, count, 0x80, 16, 0, 0xde))
        return -1;
    while (PyDict_Next(value, &at, &key, &item)) {
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key))
            return -1;
        Py_INCREF(key);
        Py_INCREF(item);
        int failed = put_value(w, key, depth + 1) || put_value(w, item, depth + 1);
        Py_DECREF(key);
        Py_DECREF(item);
        if (failed || PyDict_GET_SIZE(value) != count || ++seen > count)
            return -1;
    }
    return seen == count ? 0 : -1;
}

static int put_value(Writer *w, PyObject *value, int depth)
{
    PyTypeObject *kind = Py_TYPE(value);
    if (kind == &PyUnicode_Type)
        return put_str(w, value);
    if (kind == &PyLong_Type)
        return put_int(w, value);
    if (kind == tensor_type)
        return put_tensor(w, value);
    if (kind == &PyFloat_Type)
        return put_float(w, value);
    if (value == Py_None)
        return tagged(w, 0xc0, 0, 0);
    if (kind == &PyBool_Type)
        return tagged(w, value == Py_True ? 0xc3 : 0xc2, 0, 0);
    if (kind == array_type)
        return put_array(w, value);
    if (kind == &PyBytes_Type)
        return put_bytes(w, value);
    if (depth >= MAX_DEPTH)
        return -1;
    if (kind == &PyDict_Type)
        return put_dict(w, value, depth);
    if (kind == &PyList_Type)
        return put_items(w, value, depth);
    return kind == &PyTuple_Type ? put_tuple(w, value, depth) : -1;
}

static PyObject *made_head(Writer *w, Py_ssize_t *total)
{
    Py_ssize_t count = PyList_GET_SIZE(w->sources), meta = PREFIX + 8 * count;
    Py_ssize_t nbytes = PADDED(meta + w->nbytes);
    PyObject *head = PyBytes_FromStringAndSize(NULL, nbytes);
    if (!head)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(head);
    memset(at, 0, PREFIX);
    *total = nbytes;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(PyList_GET_ITEM(w->sources, i), 1));
        put64(at + PREFIX + 8 * i, length);
        *total += PADDED(length);
    }
    memcpy(at + meta, w->data, w->nbytes);
    memset(at + meta + w->nbytes, 0, nbytes - meta - w->nbytes);
    memcpy(at, "OMNF", 4);
    at[8] = VERSION;
    put32(at + 12, (uint32_t)count);
    put32(at + 16, (uint32_t)w->nbytes);
    put64(at + 20, *total);
    uint32_t sum;
    if (head_sum(at + 8, meta + w->nbytes - 8, &sum)) {
        Py_DECREF(head);
        return NULL;
    }
    put32(at + 4, sum);
    return head;
}

PyObject *native_encode(PyObject *module, PyObject *payload)
{
    Writer w = {.room = sizeof w.here, .sources = PyList_New(0)};
    w.data = w.here;
    if (!w.sources)
        return NULL;
    Py_ssize_t total;
    PyObject *head = NULL, *made = NULL;
    if (!put_value(&w, payload, 0) && !(w.nbytes >> 32) && (head = made_head(&w, &total)))
        made = Py_BuildValue("NnO", head, total, w.sources);
    if (w.data != w.here)
        PyMem_Free(w.data);
    Py_DECREF(w.sources);
    return made ? made : passed();
}
