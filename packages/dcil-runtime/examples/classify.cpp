// Classifies images, floats one after the other on standard input: classify net.dcil < images.f32
#include <dcil_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

int main(int, char** argv) {
  char error[DCIL_ERROR_SIZE];
  dcil_plan* plan;
  if (dcil_load(argv[1], nullptr, &plan, error) != DCIL_OK) return std::fprintf(stderr, "%s\n", error), 1;
  dcil_tensor image, scores;
  dcil_input(plan, 0, &image, error);
  dcil_output(plan, 0, &scores, error);
  std::vector<float> x(image.elements), y(scores.elements);
  const void* in[] = {x.data()};
  void* out[] = {y.data()};
  while (std::fread(x.data(), sizeof(float), x.size(), stdin) == x.size()) {
    if (dcil_run(plan, in, 1, out, error) != DCIL_OK) return std::fprintf(stderr, "%s\n", error), 1;
    std::printf("%td\n", std::max_element(y.begin(), y.end()) - y.begin());
  }
  dcil_free(plan);
}
