// The C interface, which dcil_runtime.h documents.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

#include "dcil_runtime.h"
#include "engine.h"
#include "info.h"
#include "plan_file.h"

using namespace dcil;

struct dcil_plan {
  dcil_plan(PlanFile file, const KernelSet& kernels, const dcil_options& o)
      : facts(std::move(file.facts)), engine(std::move(file.graph), kernels, o.threads, o.tune_seconds) {}

  const Facts facts;
  Engine engine;
};

namespace {

void say(char* error, const char* what) {
  if (!error) return;
  std::strncpy(error, what, DCIL_ERROR_SIZE - 1);
  error[DCIL_ERROR_SIZE - 1] = 0;
}

/// No exception leaves the library: its message goes to the caller's buffer.
template <class Body>
int guarded(char* error, Body body) {
  say(error, "");
  try {
    body();
    return DCIL_OK;
  } catch (const std::bad_alloc&) {
    say(error, "out of memory");
    return DCIL_NO_MEMORY;
  } catch (const std::system_error& e) {
    say(error, e.what());
    errno = e.code().value();
    return DCIL_SYSTEM;
  } catch (const std::exception& e) {
    say(error, e.what());
  }
  return DCIL_REFUSED;
}

/// The caller's options, whose last fields its header may not have.
dcil_options resolved(const dcil_options* given) {
  dcil_options options = DCIL_OPTIONS;
  if (given) {
    require(given->size >= sizeof given->size, "options without their size: begin with DCIL_OPTIONS");
    std::memcpy(&options, given, std::min(given->size, sizeof options));
  }
  require(options.threads >= 1 && options.threads <= 1024, "threads must be between 1 and 1024");
  return options;
}

dcil_plan* loaded(const uint8_t* bytes, size_t size, const dcil_options& options) {
  const KernelSet* kernels = find_kernels(options.isa);
  require(kernels != nullptr, "this CPU does not run the wanted instruction set");
  return new dcil_plan(parse_plan(bytes, size, {options.max_memory, options.max_work}), *kernels, options);
}

void fill(const std::vector<Port>& ports, int number, const char* none, dcil_tensor* out) {
  require(number >= 0 && size_t(number) < ports.size(), none);
  const Port& port = ports[size_t(number)];
  *out = {port.type == Type::Int64 ? DCIL_INT64 : DCIL_FLOAT32, int32_t(port.shape.size()), {}, 1};
  std::copy(port.shape.begin(), port.shape.end(), out->shape);
  for (int64_t side : port.shape) out->elements *= side;
}

char* allocated(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (!copy) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

void check_count(int count) { require(count >= 1, "a batch must have at least one image"); }

}  // namespace

int dcil_abi(void) { return DCIL_ABI; }

int dcil_format(void) { return int(kNewestVersion); }

const char* dcil_isa(const char* wanted) {
  const KernelSet* k = find_kernels(wanted);
  return k ? k->name : nullptr;
}

int dcil_load(const char* file, const dcil_options* options, dcil_plan** plan, char* error) {
  return guarded(error, [&] {
    const dcil_options chosen = resolved(options);
    const auto bytes = content_of(file, chosen.max_memory);
    *plan = loaded(bytes.data(), bytes.size(), chosen);
  });
}

int dcil_load_bytes(const void* bytes, size_t size, const dcil_options* options, dcil_plan** plan, char* error) {
  return guarded(error, [&] { *plan = loaded(static_cast<const uint8_t*>(bytes), size, resolved(options)); });
}

void dcil_free(dcil_plan* plan) { delete plan; }

int dcil_inputs(const dcil_plan* plan) { return int(plan->facts.inputs.size()); }

int dcil_outputs(const dcil_plan* plan) { return int(plan->facts.outputs.size()); }

int dcil_input(const dcil_plan* plan, int number, dcil_tensor* tensor, char* error) {
  return guarded(error, [&] { fill(plan->facts.inputs, number, "there is no such input", tensor); });
}

int dcil_output(const dcil_plan* plan, int number, dcil_tensor* tensor, char* error) {
  return guarded(error, [&] { fill(plan->facts.outputs, number, "there is no such output", tensor); });
}

int dcil_run(dcil_plan* plan, const void* const* in, int count, void* const* out, char* error) {
  return guarded(error, [&] {
    check_count(count);
    plan->engine.run(in, count, out);
  });
}

int dcil_prepare(dcil_plan* plan, int count, char* error) {
  return guarded(error, [&] { check_count(count), plan->engine.prepare(count); });
}

int64_t dcil_memory(const dcil_plan* plan) { return plan->engine.memory(); }

int dcil_info(const dcil_plan* plan, char** text, char* error) {
  return guarded(error, [&] { *text = allocated(info(plan->facts, plan->engine.graph())); });
}

int dcil_describe(dcil_plan* plan, int count, char** text, char* error) {
  return guarded(error, [&] { check_count(count), *text = allocated(plan->engine.describe(count)); });
}

void dcil_free_text(char* text) { std::free(text); }
