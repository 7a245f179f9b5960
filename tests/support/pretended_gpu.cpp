// Makes a CPU build of torch accept tensors that say they lie on cuda:0. Loaded before torch, with its symbols global.
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;

// One device with one stream: operations on it need a guard that makes it the current device
struct Guard : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(CUDA, 0); }
  c10::Device getDevice() const override { return c10::Device(CUDA, 0); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Registered {
  Registered() { c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(new Guard()); }
} registered;
}  // namespace

// Replaces the function of libtorch_cpu. Otherwise autograd asks for the streams of an accelerator that the build lacks
namespace at::accelerator {
__attribute__((visibility("default"))) bool isAccelerator(c10::DeviceType) { return false; }
}
