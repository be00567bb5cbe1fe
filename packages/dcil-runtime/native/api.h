/* The C interface: all the Python side sees. Functions return 0, or -1 with a message in `error`. */
#ifndef DCIL_API_H
#define DCIL_API_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define DCIL_EXPORT __attribute__((visibility("default")))
enum { DCIL_ABI = 2, DCIL_ERROR_SIZE = 256 };

typedef struct {
  int32_t kind, groups, count_pad, residual, twin, act, twin_act;
  int32_t window[10]; /* kh kw sy sx top left bottom right dy dx */
  int32_t input_count, channels; /* channels: length of the vectors below */
  float act_a, act_b, twin_a, twin_b;
  int64_t kept;
  const int32_t* inputs;
  const uint32_t* index; /* kept weights: positions, ascending, and values; null: `weight` holds all, zeros included */
  const float *weight, *bias, *scale, *shift, *twin_scale, *twin_shift; /* null where there are none */
} dcil_op;

DCIL_EXPORT int dcil_abi(void);
DCIL_EXPORT const char* dcil_isa(const char* wanted); /* the kernels that would be used; null: none */
/* Beyond max_memory (bytes) or max_work (multiply-adds for one image) a plan is refused. */
DCIL_EXPORT void* dcil_graph(int c, int h, int w, double max_memory, double max_work, char* error);
DCIL_EXPORT void dcil_graph_free(void* graph);
/* Counts the bytes that operators will take, before any of them is copied. */
DCIL_EXPORT int dcil_claim(void* graph, double bytes, char* error);
DCIL_EXPORT int dcil_add(void* graph, const dcil_op* op, char* error); /* the output tensor; a twin is the next one */
DCIL_EXPORT void dcil_shape(void* graph, int tensor, int32_t* chw);
/* Empties the graph: its operators move into the engine. */
DCIL_EXPORT void* dcil_engine(void* graph, const char* isa, int threads, double tune_seconds, char* error);
DCIL_EXPORT void dcil_engine_free(void* engine);
DCIL_EXPORT int dcil_prepare(void* engine, int count, char* error);
DCIL_EXPORT int dcil_run(void* engine, const float* in, int count, float* out, char* error);
DCIL_EXPORT int64_t dcil_memory(void* engine);
/* One line per step: what it is, how it was chosen to run, and measured microseconds; returns the length needed. */
DCIL_EXPORT int dcil_describe(void* engine, int count, char* text, int size, char* error);

#ifdef __cplusplus
}
#endif
#endif
