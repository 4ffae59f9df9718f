/* Loops over virtual-memory calls, with the GIL dropped once for a whole batch.
 *
 * CUDA entry points come in as plain addresses, so nothing of CUDA is needed to build this and a test can pass
 * callbacks of its own. Columns of addresses, handles and sizes are buffers of uint64. The caller (vmm/strict.py) has
 * checked the contract; here only what could make the C code itself misbehave is checked. Every loop returns
 * (done, code, op): items done, the code of the first failure (0: none), the verb that failed.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

enum { CU_NOT_READY = 600 };           /* CUDA_ERROR_NOT_READY, see CUresult in the CUDA driver API */
static const long RETRY_NANOS = 200000; /* between two tries of a call that was not ready */

typedef struct { Py_ssize_t done; int code; const char *op; } outcome;

/* --- arguments ---------------------------------------------------------------------------------------------- */

static int as_positive(PyObject *number, void *target) {
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    if (value == 0 || value > UINTPTR_MAX) {
        PyErr_SetString(PyExc_ValueError, "an address or size must be positive");
        return 0;
    }
    *(uintptr_t *)target = (uintptr_t)value;
    return 1;
}

/* The number of uint64 in each of `count` buffers, which must all be alike; -1 with an exception set otherwise. */
static Py_ssize_t length_of(Py_buffer *const *columns, int count) {
    for (int i = 0; i < count; i++) {
        int aligned = columns[i]->len == 0 || (uintptr_t)columns[i]->buf % _Alignof(uint64_t) == 0;
        if (!aligned || columns[i]->len % (Py_ssize_t)sizeof(uint64_t)) {
            PyErr_SetString(PyExc_ValueError, "a column must be a buffer of uint64");
            return -1;
        }
        if (columns[i]->len != columns[0]->len) {
            PyErr_SetString(PyExc_ValueError, "columns must be equally long");
            return -1;
        }
    }
    return columns[0]->len / (Py_ssize_t)sizeof(uint64_t);
}

/* True when every number fits a file offset; sets an exception otherwise. */
static int are_offsets(const uint64_t *numbers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (numbers[i] > INT64_MAX) {
            PyErr_SetString(PyExc_ValueError, "a file offset or size is out of range");
            return 0;
        }
    }
    return 1;
}

/* Count one item of a loop that goes on after a failure. */
static void note(outcome *end, int code) {
    end->done += !code;
    if (!end->code) end->code = code;
}

/* Let go of the columns and return the outcome, or NULL when the arguments were not legal. */
static PyObject *finish(Py_buffer *const *columns, int count, int legal, outcome end) {
    for (int i = 0; i < count; i++) PyBuffer_Release(columns[i]);
    return legal ? Py_BuildValue("(nis)", end.done, end.code, end.code ? end.op : "") : NULL;
}

/* --- CUDA ------------------------------------------------------------------------------------------------------ */

typedef int (*create_call)(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags);
typedef int (*release_call)(unsigned long long handle);
typedef int (*map_call)(unsigned long long address, size_t size, size_t offset, unsigned long long handle,
                        unsigned long long flags);
typedef int (*access_call)(unsigned long long address, size_t size, const void *access, size_t count);
typedef int (*unmap_call)(unsigned long long address, size_t size);

static PyObject *cuda_create(PyObject *self, PyObject *args) {
    uintptr_t create, properties;
    uintptr_t size;
    Py_buffer handles;
    if (!PyArg_ParseTuple(args, "O&O&O&w*:cuda_create", as_positive, &create, as_positive, &properties, as_positive,
                          &size, &handles))
        return NULL;
    Py_buffer *columns[] = {&handles};
    Py_ssize_t count = length_of(columns, 1);
    outcome end = {0, 0, "create"};
    if (count >= 0) {
        uint64_t *filled = handles.buf;
        Py_BEGIN_ALLOW_THREADS
        for (; end.done < count; end.done++) {
            unsigned long long handle = 0;
            end.code = ((create_call)create)(&handle, (size_t)size, (const void *)properties, 0);
            if (end.code) break;
            filled[end.done] = handle;
        }
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 1, count >= 0, end);
}

static PyObject *cuda_release(PyObject *self, PyObject *args) {
    uintptr_t release;
    Py_buffer handles;
    if (!PyArg_ParseTuple(args, "O&y*:cuda_release", as_positive, &release, &handles)) return NULL;
    Py_buffer *columns[] = {&handles};
    Py_ssize_t count = length_of(columns, 1);
    outcome end = {0, 0, "release"};
    if (count >= 0) {
        const uint64_t *handle = handles.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++) note(&end, ((release_call)release)(handle[i]));
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 1, count >= 0, end);
}

typedef struct { map_call map; access_call grant; unmap_call unmap; const void *access; int tries; } cuda_calls;

/* Grant access to one mapping. Under load the driver may answer "not ready", which passes. */
static int cuda_grant(const cuda_calls *cuda, uint64_t address, uint64_t size) {
    const struct timespec pause = {0, RETRY_NANOS};
    for (int left = cuda->tries;; nanosleep(&pause, NULL)) {
        int code = cuda->grant(address, (size_t)size, cuda->access, 1);
        if (code != CU_NOT_READY || --left <= 0) return code;
    }
}

static outcome cuda_map_all(const cuda_calls *cuda, const uint64_t *addresses, const uint64_t *handles,
                            const uint64_t *sizes, Py_ssize_t count) {
    outcome end = {0, 0, "map"};
    for (; end.done < count; end.done++) {
        Py_ssize_t i = end.done;
        end.code = cuda->map(addresses[i], (size_t)sizes[i], 0, handles[i], 0);
        if (end.code) break;
        end.code = cuda_grant(cuda, addresses[i], sizes[i]);
        if (end.code) {
            end.op = "set_access";
            end.done++;
            break;
        }
    }
    if (end.code) /* the first failure is the one to tell; what undoing leaves is counted in done */
        while (end.done > 0 && !cuda->unmap(addresses[end.done - 1], (size_t)sizes[end.done - 1])) end.done--;
    return end;
}

static PyObject *cuda_map(PyObject *self, PyObject *args) {
    uintptr_t map, grant, unmap, access;
    int tries;
    Py_buffer addresses, handles, sizes;
    if (!PyArg_ParseTuple(args, "O&O&O&O&iy*y*y*:cuda_map", as_positive, &map, as_positive, &grant, as_positive, &unmap,
                          as_positive, &access, &tries, &addresses, &handles, &sizes))
        return NULL;
    Py_buffer *columns[] = {&addresses, &handles, &sizes};
    Py_ssize_t count = length_of(columns, 3);
    const cuda_calls cuda = {(map_call)map, (access_call)grant, (unmap_call)unmap, (const void *)access, tries};
    outcome end = {0, 0, "map"};
    if (count >= 0) {
        Py_BEGIN_ALLOW_THREADS
        end = cuda_map_all(&cuda, addresses.buf, handles.buf, sizes.buf, count);
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 3, count >= 0, end);
}

static PyObject *cuda_unmap(PyObject *self, PyObject *args) {
    uintptr_t unmap;
    Py_buffer addresses, sizes;
    if (!PyArg_ParseTuple(args, "O&y*y*:cuda_unmap", as_positive, &unmap, &addresses, &sizes)) return NULL;
    Py_buffer *columns[] = {&addresses, &sizes};
    Py_ssize_t count = length_of(columns, 2);
    outcome end = {0, 0, "unmap"};
    if (count >= 0) {
        const uint64_t *address = addresses.buf, *size = sizes.buf;
        Py_BEGIN_ALLOW_THREADS
        for (; end.done < count && !end.code; end.done += !end.code)
            end.code = ((unmap_call)unmap)(address[end.done], (size_t)size[end.done]);
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 2, count >= 0, end);
}

/* --- the host: pages are extents of one memory file ---------------------------------------------------------- */

/* Lay inaccessible addresses over a range. Never munmap: that would leave a hole for somebody else's memory. */
static int host_cover(uint64_t address, uint64_t size) {
    void *at = mmap((void *)(uintptr_t)address, (size_t)size, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return at == MAP_FAILED ? errno : 0;
}

static int host_allocate(int file, int mode, uint64_t offset, uint64_t size) {
    while (fallocate(file, mode, (off_t)offset, (off_t)size))
        if (errno != EINTR) return errno;
    return 0;
}

/* Allocate or punch extent after extent. Allocation stops at the first failure, punching goes on to the end. */
static PyObject *host_extents(PyObject *args, const char *format, const char *op, int mode) {
    int file;
    Py_buffer offsets, sizes;
    if (!PyArg_ParseTuple(args, format, &file, &offsets, &sizes)) return NULL;
    Py_buffer *columns[] = {&offsets, &sizes};
    Py_ssize_t count = length_of(columns, 2);
    outcome end = {0, 0, op};
    const uint64_t *offset = offsets.buf, *size = sizes.buf;
    int legal = count >= 0 && are_offsets(offset, count) && are_offsets(size, count);
    if (legal) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++) {
            note(&end, host_allocate(file, mode, offset[i], size[i]));
            if (end.code && !mode) break;
        }
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 2, legal, end);
}

static PyObject *host_create(PyObject *self, PyObject *args) {
    return host_extents(args, "iy*y*:host_create", "create", 0);
}

static PyObject *host_release(PyObject *self, PyObject *args) {
    return host_extents(args, "iy*y*:host_release", "release", FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE);
}

static outcome host_map_all(int file, const uint64_t *addresses, const uint64_t *offsets, const uint64_t *sizes,
                            Py_ssize_t count) {
    outcome end = {0, 0, "map"};
    for (; end.done < count; end.done++) {
        Py_ssize_t i = end.done;
        void *at = mmap((void *)(uintptr_t)addresses[i], (size_t)sizes[i], PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, file, (off_t)offsets[i]);
        if (at != MAP_FAILED) continue;
        end.code = errno;
        while (end.done > 0 && !host_cover(addresses[end.done - 1], sizes[end.done - 1])) end.done--;
        break;
    }
    return end;
}

static PyObject *host_map(PyObject *self, PyObject *args) {
    int file;
    Py_buffer addresses, offsets, sizes;
    if (!PyArg_ParseTuple(args, "iy*y*y*:host_map", &file, &addresses, &offsets, &sizes)) return NULL;
    Py_buffer *columns[] = {&addresses, &offsets, &sizes};
    Py_ssize_t count = length_of(columns, 3);
    outcome end = {0, 0, "map"};
    int legal = count >= 0 && are_offsets(offsets.buf, count);
    if (legal) {
        Py_BEGIN_ALLOW_THREADS
        end = host_map_all(file, addresses.buf, offsets.buf, sizes.buf, count);
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 3, legal, end);
}

static PyObject *host_unmap(PyObject *self, PyObject *args) {
    Py_buffer addresses, sizes;
    if (!PyArg_ParseTuple(args, "y*y*:host_unmap", &addresses, &sizes)) return NULL;
    Py_buffer *columns[] = {&addresses, &sizes};
    Py_ssize_t count = length_of(columns, 2);
    outcome end = {0, 0, "unmap"};
    if (count >= 0) {
        const uint64_t *address = addresses.buf, *size = sizes.buf;
        Py_BEGIN_ALLOW_THREADS
        for (; end.done < count && !end.code; end.done += !end.code)
            end.code = host_cover(address[end.done], size[end.done]);
        Py_END_ALLOW_THREADS
    }
    return finish(columns, 2, count >= 0, end);
}

static PyMethodDef methods[] = {
    {"cuda_create", cuda_create, METH_VARARGS, "cuda_create(create, properties, size, handles) -> (done, code, op)"},
    {"cuda_release", cuda_release, METH_VARARGS, "cuda_release(release, handles) -> (done, code, op)"},
    {"cuda_map", cuda_map, METH_VARARGS,
     "cuda_map(map, set_access, unmap, access, tries, addresses, handles, sizes) -> (done, code, op)"},
    {"cuda_unmap", cuda_unmap, METH_VARARGS, "cuda_unmap(unmap, addresses, sizes) -> (done, code, op)"},
    {"host_create", host_create, METH_VARARGS, "host_create(file, offsets, sizes) -> (done, code, op)"},
    {"host_release", host_release, METH_VARARGS, "host_release(file, offsets, sizes) -> (done, code, op)"},
    {"host_map", host_map, METH_VARARGS, "host_map(file, addresses, offsets, sizes) -> (done, code, op)"},
    {"host_unmap", host_unmap, METH_VARARGS, "host_unmap(addresses, sizes) -> (done, code, op)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "Batches of virtual-memory calls.", .m_size = -1,
    .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
