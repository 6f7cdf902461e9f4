// Images for the fake emulator: kitsune_region(a, b, sum, difference, workspace) on arrays of floats.
//
// The workspace is one counter that has to be zero at the start. -DFAILS makes the launch fail as a deadlock would.
#include <cstddef>

extern "C" size_t fake_bytes(int i);
extern "C" void fake_fail(const char* why);

struct Params {
  const float *a, *b;
  float *sum, *difference;
  int* workspace;
};

extern "C" __attribute__((visibility("default"))) void kitsune_region(const Params& p) {
#ifdef FAILS
  fake_fail("deadlock: warp 3 waits for barrier 'full'");
#endif
  size_t n = fake_bytes(0) / sizeof(float);
  for (size_t i = 0; i < n; ++i) {
    float a = p.a[i], b = p.b[i];  // a result may share a buffer with an operand
    p.sum[i] = a + b;
    p.difference[i] = a - b;
  }
  p.workspace[0] += 1;
}
