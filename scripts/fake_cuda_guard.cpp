// Stubs that torch requires before it accepts tensors on device "cuda": a device guard, hooks, and memory that counts as
// page-locked. Preloaded into a build of torch without CUDA, they make it possible to slice and differentiate fake
// tensors on cuda:0, with the backward in the device thread of the autograd engine. Nothing here computes anything.
//
// Built and preloaded by scripts/trace_cuda.sh.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// One device, one stream, completed events.
struct OneDevice final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

OneDevice the_device;

// Host memory that counts as page-locked.
std::mutex pinned_mutex;
std::set<const void*> pinned;

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(memory);
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedMemory the_pinned_memory;

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_memory; }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(memory) > 0;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// Called after torch is loaded: a guard that is registered earlier would look like that of a real CUDA library.
extern "C" void stand_in() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&the_device);
}
