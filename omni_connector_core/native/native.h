/* What the parts of the compiled module share: the format, DLPack, and what Python has told us. */
#ifndef OMNI_CONNECTOR_NATIVE_H
#define OMNI_CONNECTOR_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(Py_GIL_DISABLED) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs the GIL and a little-endian machine; without this module Python does the same"
#endif

/* ---- the format; see frame.py and wire.py --------------------------------------------------------------------- */

enum { PREFIX = 64, VERSION = 1, INLINE = 1024, MAX_DEPTH = 100, MAX_NDIM = 64, MIN_GROUP = 8, PIECES = 1 << 16 };
enum { TENSOR_DTYPES = 64, ARRAY_DTYPES = 32 };
enum { EXT_TUPLE = 1, EXT_BYTES = 16, EXT_NDARRAY = 24, EXT_TENSOR = 32 };
#define RELEASE_GIL_NBYTES ((Py_ssize_t)1 << 21) /* as in memcpy.py */
#define PADDED(n) (((n) + 63) & ~(Py_ssize_t)63)

/* ---- DLPack 1.x, as torch 2.10 and later speak it (github.com/dmlc/dlpack) ------------------------------------- */

typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    int32_t device, device_id, ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManaged {
    uint32_t major, minor;
    void *ctx;
    void (*deleter)(struct DLManaged *);
    uint64_t flags;
    DLTensor tensor;
} DLManaged;
typedef struct {
    uint32_t major, minor;
    void *prev;
    int (*allocate)(DLTensor *, DLManaged **, void *, void (*)(void *, const char *, const char *));
    int (*from_object)(void *, DLManaged **);
    int (*to_object)(DLManaged *, void **);
    int (*borrow)(void *, DLTensor *);
    int (*stream)(int32_t, int32_t, void **);
} DLExchange;
enum { DL_CPU = 1, DL_BOOL = 6 };

/* ---- what Python told us, for the life of the process; see module.c ------------------------------------------- */

extern PyObject *PASS, *crc32_function, *dtype_name, *is_neg_name;

/* torch, if in use: type of a tensor, how to reach into one, and the dtypes by our code (no object: left to Python) */
extern PyTypeObject *tensor_type;
extern const DLExchange *torch_api;
extern struct tensor_dtype { PyObject *object; DLDataType dl; } tensor_dtypes[TENSOR_DTYPES];

/* numpy: type of an array, numpy.frombuffer of bytes, and the dtypes by our code (no letter: left to Python) */
extern PyTypeObject *array_type;
extern PyObject *frombuffer;
extern struct array_dtype { PyObject *object; char letter; uint8_t nbytes; } array_dtypes[ARRAY_DTYPES];

/* PASS, or NULL for what must not be passed over; whatever else was raised is forgotten. */
PyObject *passed(void);

/* CRC-32 of a head; -1 with an exception. */
int head_sum(const uint8_t *at, Py_ssize_t nbytes, uint32_t *sum);

PyObject *native_encode(PyObject *module, PyObject *payload);
PyObject *native_write(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *native_decode(PyObject *module, PyObject *memory);
PyObject *native_address(PyObject *module, PyObject *object);
PyObject *native_readable(PyObject *module, PyObject *fd);
PyObject *native_modified_ns(PyObject *module, PyObject *path);

static inline uint64_t get64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return v; }
static inline uint32_t get32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return v; }
static inline void put64(uint8_t *at, uint64_t v) { memcpy(at, &v, 8); }
static inline void put32(uint8_t *at, uint32_t v) { memcpy(at, &v, 4); }

/* The buffer protocol has two letters for one integer, and numpy uses both. */
static inline char same_letter(char letter)
{
    const int to_long = sizeof(long) == 8 ? 'q' - 'l' : 'i' - 'l';
    return letter == 'l' || letter == 'L' ? (char)(letter + to_long) : letter;
}

/* A long copy lets other threads run; a short one does not, because taking the GIL back may cost a switch interval. */
static inline void copy(void *to, const void *from, Py_ssize_t nbytes)
{
    if (nbytes < RELEASE_GIL_NBYTES) {
        memcpy(to, from, nbytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, nbytes);
    Py_END_ALLOW_THREADS
}

#endif
