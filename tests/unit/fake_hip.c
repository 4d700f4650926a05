/* A stand-in for libamdhip64 over host memory. The structures are written out here once more, from HIP's headers, so
 * that a wrong field in the driver's own shows. An allocation is a memory file full of 0x5A. Every call is logged.
 * fake_arm(n): call number n from now fails with hipErrorUnknown, before it does anything. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, UNKNOWN = 999 };
#define GRANULE ((size_t)1 << 16)
#define MANY 64

typedef struct { int type; int id; } Location;
typedef struct {
  int type; int requestedHandleTypes; Location location; void *win32HandleMetaData;
  struct { unsigned char compressionType; unsigned char gpuDirectRDMACapable; unsigned short usage; } allocFlags;
} Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { char *address; size_t nbytes; char *start; int fd; int access; } Entry;

static Entry reserved[MANY], mapped[MANY], allocated[MANY];
static char log_text[1 << 20];
static int armed, calls, device = 7;
int fake_version = 71200000, fake_has_vmm = 1;
size_t fake_total = 256 * GRANULE;

static Entry *find(Entry *table, const char *address) {
  for (int i = 0; i < MANY; i++) if (table[i].address == address) return &table[i];
  return NULL;
}
static size_t used(void) {
  size_t sum = 0;
  for (int i = 0; i < MANY; i++) sum += allocated[i].nbytes;
  return sum;
}
static int step(const char *name) {
  strcat(strcat(log_text, name), " ");
  return ++calls == armed ? UNKNOWN : SUCCESS;
}
#define STEP() do { int status = step(__func__); if (status) return status; } while (0)

void fake_arm(int at) { armed = at; calls = 0; log_text[0] = 0; }
const char *fake_log(void) { return log_text; }
int fake_count(void) { return calls; }
/* "reservations allocations mappings": bytes of each, to compare before and after. */
const char *fake_books(void) {
  static char text[100];
  size_t r = 0, m = 0;
  for (int i = 0; i < MANY; i++) { r += reserved[i].nbytes; m += mapped[i].nbytes; }
  snprintf(text, sizeof text, "%zu %zu %zu", r, used(), m);
  return text;
}

const char *hipGetErrorName(int code) {
  switch (code) {
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    default: return "hipErrorUnknown";
  }
}
int hipRuntimeGetVersion(int *version) { STEP(); *version = fake_version; return SUCCESS; }
int hipGetDevice(int *found) { STEP(); *found = device; return SUCCESS; }
int hipSetDevice(int wanted) { STEP(); device = wanted; return SUCCESS; }
int hipDeviceGetAttribute(int *value, int attribute, int index) {
  STEP();
  if (index != 0) return INVALID_DEVICE;
  *value = attribute == 89 && fake_has_vmm;
  return SUCCESS;
}
static int good(const Properties *p) {
  return p->type == 1 && p->requestedHandleTypes == 1 && p->location.type == 1 && p->location.id == 0 &&
         !p->win32HandleMetaData && !p->allocFlags.compressionType && !p->allocFlags.usage;
}
int hipMemGetAllocationGranularity(size_t *granularity, const Properties *p, int option) {
  STEP();
  if (!good(p) || option != 0) return INVALID_VALUE;
  *granularity = GRANULE;
  return SUCCESS;
}
int hipMemAddressReserve(void **found, size_t nbytes, size_t alignment, void *hint, unsigned long long flags) {
  STEP();
  Entry *entry = find(reserved, NULL);
  if (!nbytes || nbytes % GRANULE || alignment != GRANULE || hint || flags || !entry) return INVALID_VALUE;
  char *start = mmap(NULL, nbytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return OUT_OF_MEMORY;
  char *address = (char *)(((size_t)start + GRANULE - 1) / GRANULE * GRANULE);
  *entry = (Entry){address, nbytes, start, -1, 0};
  *found = address;
  return SUCCESS;
}
int hipMemAddressFree(char *address, size_t nbytes) {
  STEP();
  Entry *entry = find(reserved, address);
  if (!address || !entry || entry->nbytes != nbytes) return INVALID_VALUE;
  for (int i = 0; i < MANY; i++)
    if (mapped[i].address >= address && mapped[i].address < address + nbytes) return INVALID_VALUE;
  munmap(entry->start, nbytes + GRANULE);
  memset(entry, 0, sizeof *entry);
  return SUCCESS;
}
int hipMemCreate(void **handle, size_t nbytes, const Properties *p, unsigned long long flags) {
  STEP();
  Entry *entry = find(allocated, NULL);
  if (!nbytes || nbytes % GRANULE || !good(p) || flags || !entry) return INVALID_VALUE;
  if (nbytes > fake_total - used()) return OUT_OF_MEMORY;
  int fd = memfd_create("fake", 0);
  char *filler = memset(malloc(nbytes), 0x5A, nbytes);
  if (write(fd, filler, nbytes) != (ssize_t)nbytes) return UNKNOWN;
  free(filler);
  *entry = (Entry){(char *)entry, nbytes, NULL, fd, 0};
  *handle = entry;
  return SUCCESS;
}
int hipMemRelease(char *handle) {
  STEP();
  Entry *entry = find(allocated, handle);
  if (!handle || !entry) return INVALID_VALUE;
  for (int i = 0; i < MANY; i++) if (mapped[i].start == handle) return INVALID_VALUE;
  close(entry->fd);
  memset(entry, 0, sizeof *entry);
  return SUCCESS;
}
int hipMemMap(char *address, size_t nbytes, size_t offset, char *handle, unsigned long long flags) {
  STEP();
  Entry *allocation = find(allocated, handle), *entry = find(mapped, NULL);
  if (!handle || !allocation || !entry || allocation->nbytes != nbytes || offset || flags) return INVALID_VALUE;
  int inside = 0;
  for (int i = 0; i < MANY; i++) {
    inside |= reserved[i].address && reserved[i].address <= address &&
              address + nbytes <= reserved[i].address + reserved[i].nbytes;
    if (mapped[i].address && mapped[i].address < address + nbytes && address < mapped[i].address + mapped[i].nbytes)
      return INVALID_VALUE;
  }
  if (!inside || mmap(address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) != address)
    return INVALID_VALUE;
  *entry = (Entry){address, nbytes, handle, -1, 0};
  return SUCCESS;
}
int hipMemSetAccess(char *address, size_t nbytes, const Access *access, size_t count) {
  STEP();
  Entry *entry = find(mapped, address);
  int right = count == 1 && access->location.type == 1 && access->location.id == 0 && access->flags == 3;
  if (!address || !entry || entry->nbytes != nbytes || !right) return INVALID_VALUE;
  entry->access = 1;
  return mprotect(address, nbytes, PROT_READ | PROT_WRITE) ? UNKNOWN : SUCCESS;
}
int hipMemUnmap(char *address, size_t nbytes) {
  STEP();
  Entry *entry = find(mapped, address);
  if (!address || !entry || entry->nbytes != nbytes) return INVALID_VALUE;
  mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  memset(entry, 0, sizeof *entry);
  return SUCCESS;
}
int hipMemGetInfo(size_t *free_bytes, size_t *total) {
  STEP();
  if (device != 0) return INVALID_DEVICE;
  *free_bytes = fake_total - used();
  *total = fake_total;
  return SUCCESS;
}
int hipDeviceSynchronize(void) { STEP(); return device == 0 ? SUCCESS : INVALID_DEVICE; }
int hipMemExportToShareableHandle(void *fd, char *handle, int type, unsigned long long flags) {
  STEP();
  Entry *entry = find(allocated, handle);
  if (!handle || !entry || type != 1 || flags) return INVALID_VALUE;
  *(int *)fd = dup(entry->fd);
  return SUCCESS;
}
int hipMemImportFromShareableHandle(void **handle, void *fd, int type) {
  STEP();
  Entry *entry = find(allocated, NULL);
  struct stat status;
  if (type != 1 || !entry || fstat((int)(size_t)fd, &status)) return INVALID_VALUE;
  *entry = (Entry){(char *)entry, (size_t)status.st_size, NULL, dup((int)(size_t)fd), 0};
  *handle = entry;
  return SUCCESS;
}
