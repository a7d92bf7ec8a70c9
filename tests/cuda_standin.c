/* The few functions of the CUDA driver that the library calls, with the documented behaviour, for machines without a GPU.

   What is "GPU memory" here was declared so; it is ordinary memory. Addresses that nobody declared are host memory: all
   attributes 0, and success, as cuPointerGetAttributes documents it. */

#include <stddef.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, MOST = 64 };
enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, RANGE_START_ADDR = 11, RANGE_SIZE = 12 };

static struct { unsigned long long start; size_t size; int device; unsigned managed; } allocations[MOST];
static int declared, failure = NOT_INITIALIZED, devices, primary = -1;
static void *current;

void standin_set(int code, int count, int active, void *context) {
    failure = code, devices = count, primary = active, current = context;
}

void standin_declare(unsigned long long start, size_t size, int device, int managed) {
    allocations[declared].start = start, allocations[declared].size = size;
    allocations[declared].device = device, allocations[declared++].managed = (unsigned)managed;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long long address) {
    int at = -1;
    if (failure) return failure;
    for (int i = 0; i < declared; i++)
        if (address >= allocations[i].start && address - allocations[i].start < allocations[i].size) at = i;
    for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
        case MEMORY_TYPE: *(unsigned *)data[i] = at < 0 ? 0 : 2; break;
        case IS_MANAGED: *(unsigned *)data[i] = at < 0 ? 0 : allocations[at].managed; break;
        case DEVICE_ORDINAL: *(int *)data[i] = at < 0 ? -2 : allocations[at].device; break;
        case RANGE_START_ADDR: *(unsigned long long *)data[i] = at < 0 ? 0 : allocations[at].start; break;
        case RANGE_SIZE: *(size_t *)data[i] = at < 0 ? 0 : allocations[at].size; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    if (failure) return failure;
    *context = current;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    if (failure) return failure;
    *count = devices;
    return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (failure) return failure;
    if (device < 0 || device >= devices) return INVALID_VALUE;
    *flags = 0, *active = device == primary;
    return SUCCESS;
}
