/* Run sparse networks on a CPU from C or C++: load a plan file, ask for its shapes, run it.
 *
 *   char error[DCIL_ERROR_SIZE];
 *   dcil_plan* plan;
 *   if (dcil_load("net.dcil", NULL, &plan, error) != DCIL_OK) { fputs(error, stderr); return 1; }
 *   const void* in[] = {images};                    // float[count][3][32][32]
 *   void* out[] = {logits};                         // float[count][10]
 *   if (dcil_run(plan, in, count, out, error) != DCIL_OK) ...
 *   dcil_free(plan);
 *
 * The compiler's and linker's flags are what `python -m dcil_runtime --cflags --libs` prints.
 *
 * Every function may be called from several threads, with the same plan too (but dcil_free, which ends it). Calls run
 * concurrently, each with buffers of its own. A plan works on in a forked child.
 *
 * Functions that can fail return DCIL_OK or one of the other codes and put one line into `error`, an array of
 * DCIL_ERROR_SIZE characters that the caller provides; NULL: no message. No exception leaves the library.
 *
 * Stable: what is declared here keeps its meaning in every later version with the same DCIL_ABI. Functions and codes may
 * be added, and fields at the end of dcil_options. */
#ifndef DCIL_RUNTIME_H
#define DCIL_RUNTIME_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define DCIL_EXPORT __attribute__((visibility("default")))
#define DCIL_ABI 3
#define DCIL_ERROR_SIZE 256
#define DCIL_MAX_RANK 8

enum {
  DCIL_OK = 0,
  DCIL_REFUSED = -1,   /* a file that is damaged or no plan or asks for more than the limits; a wrong argument */
  DCIL_NO_MEMORY = -2,
  DCIL_SYSTEM = -3     /* a file cannot be opened or read: errno says why */
};

/* Types of elements. Networks that read tokens have inputs of int64_t; all other inputs and all outputs are float. */
enum { DCIL_FLOAT32 = 0, DCIL_INT64 = 1 };

/* The DCIL_ABI of the library; compare it with the header's where the two may differ. */
DCIL_EXPORT int dcil_abi(void);
/* The newest version of plan files that the library reads. It reads all before it, too. */
DCIL_EXPORT int dcil_format(void);
/* The kernels that `wanted` gives on this CPU (NULL or "": the best): "avx512", "avx2", ..., "portable"; NULL: none. */
DCIL_EXPORT const char* dcil_isa(const char* wanted);

/* How to run a plan: dcil_options options = DCIL_OPTIONS; options.threads = 4; */
typedef struct {
  size_t size;         /* sizeof(dcil_options), so that fields can be added */
  const char* isa;     /* as for dcil_isa */
  int32_t threads;     /* that share a call, where measuring says that this helps */
  double tune_seconds; /* about so long the first call of a batch size class measures how to run each layer */
  double max_memory;   /* bytes: weights, tables and the buffers of one call; a plan that asks for more is refused */
  double max_work;     /* multiply-adds for one image; a plan that takes more is refused */
} dcil_options;
#define DCIL_OPTIONS {sizeof(dcil_options), NULL, 1, 1.5, 4294967296.0, 34359738368.0}

typedef struct dcil_plan dcil_plan;

/* Read a plan file, check it in full and lay it out for this CPU. `options` NULL: DCIL_OPTIONS. */
DCIL_EXPORT int dcil_load(const char* file, const dcil_options* options, dcil_plan** plan, char* error);
/* The same from the bytes of a file, which are copied. */
DCIL_EXPORT int dcil_load_bytes(const void* bytes, size_t size, const dcil_options* options, dcil_plan** plan,
                                char* error);
/* End a plan; NULL is none. */
DCIL_EXPORT void dcil_free(dcil_plan* plan);

/* One input or output, without the batch: a batch is `count` of them, one after the other, in C order. */
typedef struct {
  int32_t type; /* DCIL_FLOAT32 or DCIL_INT64 */
  int32_t rank;
  int64_t shape[DCIL_MAX_RANK]; /* channels, height, width; or channels; or what the network gives */
  int64_t elements;             /* the product of `shape` */
} dcil_tensor;

DCIL_EXPORT int dcil_inputs(const dcil_plan* plan); /* how many */
DCIL_EXPORT int dcil_outputs(const dcil_plan* plan);
DCIL_EXPORT int dcil_input(const dcil_plan* plan, int number, dcil_tensor* tensor, char* error);
DCIL_EXPORT int dcil_output(const dcil_plan* plan, int number, dcil_tensor* tensor, char* error);

/* Run the network on a batch: in[i] holds count * elements of input i, out[i] receives count * elements of output i. */
DCIL_EXPORT int dcil_run(dcil_plan* plan, const void* const* in, int count, void* const* out, char* error);
/* Lay out and tune for this batch size now, as the first dcil_run would. */
DCIL_EXPORT int dcil_prepare(dcil_plan* plan, int count, char* error);
/* The bytes held now: weights, tables and the buffers of all concurrent calls. */
DCIL_EXPORT int64_t dcil_memory(const dcil_plan* plan);

/* JSON: what is in the file. To be released with dcil_free_text. Keys may be added. */
DCIL_EXPORT int dcil_info(const dcil_plan* plan, char** text, char* error);
/* JSON: the steps that a batch of this size takes, how each was chosen to run, and its time, measured now. */
DCIL_EXPORT int dcil_describe(dcil_plan* plan, int count, char** text, char* error);
DCIL_EXPORT void dcil_free_text(char* text);

#ifdef __cplusplus
}
#endif
#endif
