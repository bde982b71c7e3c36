/* The payload of a frame. */
#include "native.h"

typedef struct {
    const uint8_t *at, *end;
    PyObject *memory, *base; /* base: an array over the memory, made for the first array in it */
    uint8_t *frame;
    int readonly;
    uint32_t count, *used;
    const uint8_t *lengths;
    uint64_t *offsets;
} Reader;

/* What a tensor holds on to: the memory, exported, so that nobody closes it under the tensor. */
typedef struct {
    DLManaged managed;
    Py_buffer view;
    int64_t shape[];
} Held;

static void let_go(DLManaged *managed)
{
    Held *held = managed->ctx;
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        PyBuffer_Release(&held->view);
        PyMem_RawFree(held);
        PyGILState_Release(state);
    }
}

static PyObject *get_value(Reader *r, int depth);

/* Where a buffer lies, once; NULL for "not mine". */
static uint8_t *take(Reader *r, uint32_t index, uint64_t nbytes)
{
    if (index >= r->count || r->used[index] || get64(r->lengths + 8 * index) != nbytes)
        return NULL;
    r->used[index] = 1;
    return r->frame + r->offsets[index];
}

/* Whether bytes are bools: what computes with others later is undefined. */
static int all_bool(const uint8_t *data, uint64_t nbytes)
{
    uint8_t bits = 0;
    for (uint64_t i = 0; i < nbytes; i++)
        bits |= data[i];
    return bits <= 1;
}

static int get_shape(const uint8_t *at, Py_ssize_t nbytes, uint64_t itemsize, int64_t *shape, uint64_t *length)
{
    if (nbytes < 6 || at[1] > MAX_NDIM || nbytes != 6 + 8 * at[1])
        return -1;
    *length = itemsize;
    for (int i = 0; i < at[1]; i++) {
        uint64_t n = get64(at + 6 + 8 * i);
        if (!n || __builtin_mul_overflow(*length, n, length) || *length >> 62)
            return -1;
        shape[i] = (int64_t)n;
    }
    return 0;
}

static PyObject *get_tensor(Reader *r, const uint8_t *at, Py_ssize_t nbytes)
{
    int64_t shape[MAX_NDIM];
    uint64_t length;
    if (nbytes < 6 || at[0] >= TENSOR_DTYPES || !tensor_dtypes[at[0]].object || r->readonly)
        return NULL;
    DLDataType dtype = tensor_dtypes[at[0]].dl;
    if (get_shape(at, nbytes, dtype.bits / 8, shape, &length))
        return NULL;
    int ndim = at[1];
    uint8_t *data = take(r, get32(at + 2), length);
    if (!data || (dtype.code == DL_BOOL && !all_bool(data, length)))
        return NULL;
    Held *held = PyMem_RawMalloc(sizeof *held + ndim * sizeof(int64_t));
    if (!held)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(r->memory, &held->view, PyBUF_WRITABLE)) {
        PyMem_RawFree(held);
        return NULL;
    }
    memcpy(held->shape, shape, ndim * sizeof(int64_t));
    /* of version 1.0, in which no strides means row-major order */
    held->managed = (DLManaged){.major = 1, .ctx = held, .deleter = let_go, .tensor = {.data = data, .device = DL_CPU,
        .ndim = ndim, .dtype = dtype, .shape = held->shape}};
    void *made = NULL;
    /* if it fails it may have let go already: rather lose a few bytes than free them twice */
    return torch_api->to_object(&held->managed, &made) ? NULL : made;
}

static PyObject *get_array(Reader *r, const uint8_t *at, Py_ssize_t nbytes)
{
    int64_t shape[MAX_NDIM];
    uint64_t length;
    if (nbytes < 6 || at[0] >= ARRAY_DTYPES || !array_dtypes[at[0]].letter)
        return NULL;
    struct array_dtype *dtype = &array_dtypes[at[0]];
    if (get_shape(at, nbytes, dtype->nbytes, shape, &length))
        return NULL;
    uint32_t index = get32(at + 2);
    uint8_t *data = take(r, index, length);
    if (!data || (dtype->letter == '?' && !all_bool(data, length)))
        return NULL;
    if (!r->base && !(r->base = PyObject_CallOneArg(frombuffer, r->memory)))
        return NULL;
    PyObject *dims = PyTuple_New(at[1]), *made = NULL;
    for (int i = 0; dims && i < at[1]; i++) {
        PyObject *n = PyLong_FromLongLong(shape[i]);
        if (!n)
            Py_CLEAR(dims);
        else
            PyTuple_SET_ITEM(dims, i, n);
    }
    PyObject *offset = PyLong_FromUnsignedLongLong(r->offsets[index]);
    if (dims && offset) {
        PyObject *args[] = {dims, dtype->object, r->base, offset};
        made = PyObject_Vectorcall((PyObject *)array_type, args, 4, NULL);
    }
    Py_XDECREF(dims);
    Py_XDECREF(offset);
    return made;
}

static PyObject *get_bytes(Reader *r, const uint8_t *at, Py_ssize_t nbytes)
{
    uint32_t index = nbytes == 4 ? get32(at) : UINT32_MAX;
    if (index >= r->count)
        return NULL;
    uint64_t length = get64(r->lengths + 8 * index);
    uint8_t *data = take(r, index, length);
    PyObject *made = data ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length) : NULL;
    if (made)
        copy(PyBytes_AS_STRING(made), data, (Py_ssize_t)length);
    return made;
}

static int get_count(Reader *r, int nbytes, uint64_t *value)
{
    if (r->end - r->at < nbytes)
        return -1;
    *value = 0;
    while (nbytes--)
        *value = *value << 8 | *r->at++;
    return 0;
}

static PyObject *get_items(Reader *r, uint64_t count, int depth)
{
    if (depth >= MAX_DEPTH || count > (uint64_t)(r->end - r->at))
        return NULL;
    /* lists in lists may each claim to be as long as what is left: room is made for what is really there */
    PyObject *made = PyList_New(0);
    while (made && count--) {
        PyObject *item = get_value(r, depth + 1);
        if (!item || PyList_Append(made, item))
            Py_CLEAR(made);
        Py_XDECREF(item);
    }
    return made;
}

static PyObject *get_map(Reader *r, uint64_t count, int depth)
{
    if (depth >= MAX_DEPTH || count > (uint64_t)(r->end - r->at))
        return NULL;
    PyObject *made = PyDict_New();
    while (made && count--) {
        PyObject *key = get_value(r, depth + 1);
        PyObject *item = key && (PyUnicode_CheckExact(key) || PyLong_CheckExact(key)) ? get_value(r, depth + 1) : NULL;
        if (!item || PyDict_SetItem(made, key, item))
            Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(item);
    }
    return made;
}

static PyObject *get_tuple(Reader *r, const uint8_t *at, Py_ssize_t nbytes, int depth)
{
    if (depth >= MAX_DEPTH)
        return NULL;
    const uint8_t *after = r->at, *end = r->end;
    r->at = at;
    r->end = at + nbytes;
    PyObject *list = get_value(r, depth + 1), *made = NULL;
    if (list && PyList_CheckExact(list) && r->at == r->end)
        made = PyList_AsTuple(list);
    Py_XDECREF(list);
    r->at = after;
    r->end = end;
    return made;
}

static PyObject *get_ext(Reader *r, uint64_t nbytes, int depth)
{
    if ((uint64_t)(r->end - r->at) < nbytes + 1)
        return NULL;
    uint8_t code = *r->at;
    const uint8_t *at = r->at + 1;
    r->at = at + nbytes;
    if (code == EXT_TENSOR)
        return get_tensor(r, at, (Py_ssize_t)nbytes);
    if (code == EXT_NDARRAY)
        return get_array(r, at, (Py_ssize_t)nbytes);
    if (code == EXT_TUPLE)
        return get_tuple(r, at, (Py_ssize_t)nbytes, depth);
    return code == EXT_BYTES ? get_bytes(r, at, (Py_ssize_t)nbytes) : NULL;
}

static PyObject *get_data(Reader *r, uint64_t nbytes, int text)
{
    if ((uint64_t)(r->end - r->at) < nbytes)
        return NULL;
    const char *at = (const char *)r->at;
    r->at += nbytes;
    return text ? PyUnicode_DecodeUTF8(at, nbytes, NULL) : PyBytes_FromStringAndSize(at, nbytes);
}

/* A new reference, or NULL for "not mine", in which case an exception may or may not be set. */
static PyObject *get_value(Reader *r, int depth)
{
    uint64_t v;
    if (r->at >= r->end)
        return NULL;
    uint8_t tag = *r->at++;
    if (tag < 0x80)
        return PyLong_FromLong(tag);
    if (tag < 0x90)
        return get_map(r, tag & 15, depth);
    if (tag < 0xa0)
        return get_items(r, tag & 15, depth);
    if (tag < 0xc0)
        return get_data(r, tag & 31, 1);
    if (tag >= 0xe0)
        return PyLong_FromLong((int8_t)tag);
    switch (tag) {
    case 0xc0:
        Py_RETURN_NONE;
    case 0xc2:
        Py_RETURN_FALSE;
    case 0xc3:
        Py_RETURN_TRUE;
    case 0xcb: {
        double d;
        if (get_count(r, 8, &v))
            return NULL;
        memcpy(&d, &v, 8);
        return PyFloat_FromDouble(d);
    }
    case 0xc4: case 0xc5: case 0xc6:
        return get_count(r, 1 << (tag - 0xc4), &v) ? NULL : get_data(r, v, 0);
    case 0xc7: case 0xc8: case 0xc9:
        return get_count(r, 1 << (tag - 0xc7), &v) ? NULL : get_ext(r, v, depth);
    case 0xcc: case 0xcd: case 0xce: case 0xcf:
        return get_count(r, 1 << (tag - 0xcc), &v) ? NULL : PyLong_FromUnsignedLongLong(v);
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: {
        int nbytes = 1 << (tag - 0xd0);
        if (get_count(r, nbytes, &v))
            return NULL;
        return PyLong_FromLongLong((int64_t)(v << (64 - 8 * nbytes)) >> (64 - 8 * nbytes));
    }
    case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return get_ext(r, 1u << (tag - 0xd4), depth);
    case 0xd9: case 0xda: case 0xdb:
        return get_count(r, 1 << (tag - 0xd9), &v) ? NULL : get_data(r, v, 1);
    case 0xdc: case 0xdd:
        return get_count(r, 2 << (tag - 0xdc), &v) ? NULL : get_items(r, v, depth);
    case 0xde: case 0xdf:
        return get_count(r, 2 << (tag - 0xde), &v) ? NULL : get_map(r, v, depth);
    }
    return NULL;
}

/* The head, copied: the producer may still write to memory that is shared with it. NULL for "not mine". */
static uint8_t *own_head(const Py_buffer *view, Reader *r)
{
    const uint8_t *frame = view->buf;
    if (view->len < PREFIX)
        return NULL;
    uint64_t count = get32(frame + 12), meta = PREFIX + 8 * count, end = meta + get32(frame + 16);
    uint64_t nbytes = (end + 63) & ~(uint64_t)63, total = nbytes;
    if (count >= PIECES || nbytes > (uint64_t)view->len)
        return NULL;
    uint8_t *own = PyMem_Malloc(nbytes + count * 12);
    if (!own)
        return NULL;
    memcpy(own, frame, nbytes);
    uint32_t sum;
    static const uint8_t zeros[28];
    if (memcmp(own, "OMNF", 4) || own[8] != VERSION || own[9] || own[10] || own[11] || get32(own + 12) != count
        || PREFIX + 8 * count + get32(own + 16) != end || get64(own + 28) || memcmp(own + 36, zeros, 28)
        || head_sum(own + 8, (Py_ssize_t)end - 8, &sum) || sum != get32(own + 4))
        goto not_mine;
    r->count = (uint32_t)count;
    r->lengths = own + PREFIX;
    r->offsets = (uint64_t *)(own + nbytes);
    r->used = (uint32_t *)(own + nbytes + 8 * count);
    memset(r->used, 0, 4 * count);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t length = get64(r->lengths + 8 * i);
        r->offsets[i] = total;
        if (length >> 62 || (total += (length + 63) & ~(uint64_t)63) > (uint64_t)view->len)
            goto not_mine;
    }
    if (total != get64(own + 20))
        goto not_mine;
    r->at = own + meta;
    r->end = own + end;
    return own;
not_mine:
    PyMem_Free(own);
    return NULL;
}

PyObject *native_decode(PyObject *module, PyObject *memory)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE))
        return passed();
    Reader r = {.memory = memory, .frame = view.buf, .readonly = view.readonly};
    uint8_t *head = own_head(&view, &r);
    PyObject *made = head ? get_value(&r, 0) : NULL;
    if (made && r.at != r.end)
        Py_CLEAR(made);
    Py_XDECREF(r.base);
    PyMem_Free(head);
    PyBuffer_Release(&view);
    return made ? made : passed();
}
