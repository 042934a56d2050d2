// The pretended devices: their memory, their random generators, and what torch's C++ side is told of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace pretend {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceIndex kDevices = 2;
inline thread_local DeviceIndex current_device = 0;

// What a test may read, in this order (`pretend_counter`).
struct Counters {
  std::atomic<int64_t> launches{0};   // operators that a real device would run as kernels
  std::atomic<int64_t> waits{0};      // times that the program would wait for the device
  std::atomic<int64_t> to_device{0};  // copies from the host
  std::atomic<int64_t> to_host{0};    // copies to the host
  std::atomic<int64_t> between{0};    // copies from one device to another
};
inline Counters counters;

// Called with the operator's name at every wait, so that Python can say which line caused it.
inline void (*wait_observer)(const char*) = nullptr;

inline void wait(const char* why) {
  ++counters.waits;
  if (wait_observer != nullptr) wait_observer(why);
}

inline Device device_or_current(std::optional<Device> given) {
  Device device = given.value_or(Device(DeviceType::CUDA, -1));
  if (!device.has_index()) device = Device(DeviceType::CUDA, current_device);
  TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal (there are ", int(kDevices), " pretended devices)");
  return device;
}

// ---- Memory ---------------------------------------------------------------------------------------------------

inline std::atomic<int64_t> allocated[kDevices], peak[kDevices];

struct Block {
  void* data;
  int64_t size;
  DeviceIndex device;
};

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

// The host's memory, counted as a device's. It is filled with 0xFF: NaN where floating-point numbers are read before
// they are written, -1 where integers are.
struct DeviceMemory final : c10::Allocator {
  explicit DeviceMemory(DeviceIndex device) : device(device) {}

  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size > 0) {
      TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "CUDA out of memory on pretended device ", int(device));
      std::memset(data, 0xFF, size);
    }
    const int64_t now = allocated[device] += int64_t(size);
    if (now > peak[device]) peak[device] = now;
    return {data, new Block{data, int64_t(size), device}, &free_block, Device(DeviceType::CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  DeviceIndex device;
};
inline DeviceMemory memories[kDevices] = {DeviceMemory(0), DeviceMemory(1)};

// What `pin_memory` allocates: ordinary memory of the host.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size > 0 ? std::malloc(size) : nullptr;
    return {data, data, &std::free, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
inline PinnedMemory pinned_memory;

// ---- Random numbers -------------------------------------------------------------------------------------------

// A generator with the state of CUDA's Philox: a seed and an offset, in a tensor of 16 bytes on the CPU. Every
// operator that draws gets a CPU generator seeded from both, so that equal states give equal numbers (not those of a
// real device).
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

  // The generator on the host for the next operator.
  at::Generator next() {
    const uint64_t mixed = (seed_ * 0x9E3779B97F4A7C15ull) ^ ((offset_ + 1) * 0xBF58476D1CE4E5B9ull);
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed);
  }

  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline at::Generator& default_generator(DeviceIndex device) {
  static at::Generator all[kDevices] = {
      at::make_generator<DeviceGenerator>(DeviceIndex(0)), at::make_generator<DeviceGenerator>(DeviceIndex(1))};
  return all[device < 0 ? current_device : device];
}

// ---- What torch asks of a backend -----------------------------------------------------------------------------

// The current device; there is one stream, on which everything has always finished.
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize stream"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

}  // namespace pretend

namespace at {

// torch looks for the hooks by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return pretend::kDevices; }
  DeviceIndex deviceCount() const override { return pretend::kDevices; }

  DeviceIndex current_device() const override { return pretend::current_device; }
  DeviceIndex getCurrentDevice() const override { return pretend::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { pretend::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = pretend::current_device;
    pretend::current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? pretend::current_device : exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex) const override { pretend::wait("synchronize"); }

  const Generator& getDefaultGenerator(DeviceIndex device = -1) const override { return pretend::default_generator(device); }
  Generator getNewGenerator(DeviceIndex device = -1) const override {
    return make_generator<pretend::DeviceGenerator>(device < 0 ? pretend::current_device : device);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, pretend::current_device); }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return &pretend::pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &pretend::memories[pretend::current_device]; }
};

}  // namespace at
