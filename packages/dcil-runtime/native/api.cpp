#include "api.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "engine.h"

using namespace dcil;

namespace {

/// No exception leaves the library: its message goes to the caller's buffer.
template <class Body>
auto guarded(char* error, decltype(std::declval<Body>()()) failed, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    std::strncpy(error, "out of memory", DCIL_ERROR_SIZE - 1);
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), DCIL_ERROR_SIZE - 1);
  }
  return failed;
}

std::vector<float> copy(const float* from, int64_t count) {
  return from ? std::vector<float>(from, from + count) : std::vector<float>();
}

void copy_nonzero(const dcil_op& s, Op& op) {
  if (s.kept >= INT32_MAX) throw Error("a layer has more than 2^29 weights");
  const size_t zeros = size_t(std::count(s.weight, s.weight + s.kept, 0.0f));
  op.index.reserve(size_t(s.kept) - zeros);
  op.weight.reserve(size_t(s.kept) - zeros);
  for (int64_t i = 0; i < s.kept; i++)
    if (s.weight[i] != 0) op.index.push_back(uint32_t(i)), op.weight.push_back(s.weight[i]);
}

Op to_op(const dcil_op& s) {
  if (s.kept < 0 || s.channels < 0 || s.input_count < 0) throw Error("a negative size");
  Op op;
  op.kind = Kind(s.kind);
  op.in.assign(s.inputs, s.inputs + s.input_count);
  op.residual = s.residual;
  op.twin = s.twin;
  const int32_t* w = s.window;
  op.window = {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9]};
  op.groups = s.groups;
  op.count_pad = s.count_pad;
  op.act = {Act(s.act), s.act_a, s.act_b};
  op.twin_act = {Act(s.twin_act), s.twin_a, s.twin_b};
  if (s.index) {
    op.index.assign(s.index, s.index + s.kept);
    op.weight = copy(s.weight, s.kept);
  } else if (s.weight) {
    copy_nonzero(s, op);
  }
  op.bias = copy(s.bias, s.channels);
  op.scale = copy(s.scale, s.channels);
  op.shift = copy(s.shift, s.channels);
  op.twin_scale = copy(s.twin_scale, s.channels);
  op.twin_shift = copy(s.twin_shift, s.channels);
  return op;
}

}  // namespace

int dcil_abi(void) { return DCIL_ABI; }

const char* dcil_isa(const char* wanted) {
  const KernelSet* k = find_kernels(wanted);
  return k ? k->name : nullptr;
}

void* dcil_graph(int c, int h, int w, double max_memory, double max_work, char* error) {
  return guarded(error, static_cast<void*>(nullptr),
                 [&]() -> void* { return new Graph(Shape{c, h, w}, Limits{max_memory, max_work}); });
}

void dcil_graph_free(void* graph) { delete static_cast<Graph*>(graph); }

int dcil_claim(void* graph, double bytes, char* error) {
  return guarded(error, -1, [&] { return static_cast<Graph*>(graph)->claim(bytes), 0; });
}

int dcil_add(void* graph, const dcil_op* op, char* error) {
  return guarded(error, -1, [&] { return static_cast<Graph*>(graph)->add(to_op(*op)); });
}

void dcil_shape(void* graph, int tensor, int32_t* chw) {
  const Shape& s = static_cast<Graph*>(graph)->shapes()[size_t(tensor)];
  chw[0] = s.c;
  chw[1] = s.h;
  chw[2] = s.w;
}

void* dcil_engine(void* graph, const char* isa, int threads, double tune_seconds, char* error) {
  return guarded(error, static_cast<void*>(nullptr), [&]() -> void* {
    const KernelSet* kernels = find_kernels(isa);
    if (!kernels) throw Error("this CPU does not run the wanted instruction set");
    if (threads < 1 || threads > 1024) throw Error("threads must be between 1 and 1024");
    return new Engine(std::move(*static_cast<Graph*>(graph)), *kernels, threads, tune_seconds);
  });
}

void dcil_engine_free(void* engine) { delete static_cast<Engine*>(engine); }

int dcil_prepare(void* engine, int count, char* error) {
  return guarded(error, -1, [&] { return static_cast<Engine*>(engine)->prepare(count), 0; });
}

int dcil_run(void* engine, const float* in, int count, float* out, char* error) {
  return guarded(error, -1, [&] { return static_cast<Engine*>(engine)->run(in, count, out), 0; });
}

int64_t dcil_memory(void* engine) { return static_cast<Engine*>(engine)->memory(); }

int dcil_describe(void* engine, int count, char* text, int size, char* error) {
  return guarded(error, -1, [&] {
    const std::string all = static_cast<Engine*>(engine)->describe(count);
    if (size > 0) std::strncpy(text, all.c_str(), size_t(size) - 1), text[size - 1] = 0;
    return int(all.size()) + 1;
  });
}
