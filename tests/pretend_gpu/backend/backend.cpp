// A pretended CUDA for a CPU build of torch: tensors whose device is cuda:0 or cuda:1 and whose memory is the host's.
//
// `run_on_host` is the fallback of the dispatch key CUDA: it gets every operator that has no kernel for it, checks the
// arguments as a real device would (rules.h), computes with the CPU's kernel on the same memory, and gives the results
// the device back. Only allocation, copies and storages have functions of their own.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <unordered_map>

#include "devices.h"
#include "rules.h"

namespace pretend {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

// ---- The same memory as a tensor of the host, and back ----------------------------------------------------------

Tensor tensor_over(c10::Storage storage, const Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// A storage of another device over the same bytes; it keeps `storage` alive.
c10::Storage same_bytes(const c10::Storage& storage, Device device, c10::Allocator* allocator) {
  auto* keep = new c10::Storage(storage);
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(const_cast<void*>(storage.data()), keep, release, device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, /*resizable=*/true));
}

c10::Storage on_device(const c10::Storage& storage, Device device) {
  return same_bytes(storage, device, &memories[device.index()]);
}

Tensor on_device(const Tensor& tensor, Device device) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "the pretended device has strided tensors only");
  check_dtype(tensor.scalar_type());
  return tensor_over(on_device(tensor.storage(), device), tensor, DispatchKey::CUDA);
}

// Tensors of the host for one operator: two tensors that share a storage on the device share one here.
class HostTensors {
 public:
  Tensor of(const Tensor& tensor) {
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end())
      found = storages_.emplace(key, same_bytes(tensor.storage(), Device(DeviceType::CPU), c10::GetAllocator(DeviceType::CPU))).first;
    return tensor_over(found->second, tensor, DispatchKey::CPU);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// ---- The fallback ------------------------------------------------------------------------------------------------

bool is_written(const c10::Argument& argument) {
  return argument.is_out() || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
}

// Replace every defined tensor in an argument or result by what `change` makes of it.
template <typename Change>
void each_tensor(IValue& value, const Change& change) {
  if (value.isTensor()) {
    auto tensor = value.toTensor();
    if (tensor.defined()) value = change(tensor);
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    value = list;
  }
}

Call call_of(const c10::FunctionSchema& schema, IValue* arguments) {
  Call call{operator_of(schema)};
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      call.tensors.push_back({tensor, &argument.name(), is_written(argument)});
      return tensor;
    });
    if (arguments[i].isDevice()) call.requested = device_or_current(arguments[i].toDevice());
    if (arguments[i].isGenerator()) call.generator = arguments[i].toGenerator();
  }
  return call;
}

Device device_of(const Call& call) {
  if (call.requested) return *call.requested;
  for (const auto& one : call.tensors)
    if (one.tensor.is_cuda()) return one.tensor.device();
  return Device(DeviceType::CUDA, current_device);
}

// An operator may have resized what it wrote: the tensor of the device takes over size, strides and storage.
void take_over(const Tensor& device_tensor, const Tensor& host_tensor) {
  auto* impl = device_tensor.unsafeGetTensorImpl();
  const auto &before = device_tensor.storage(), &after = host_tensor.storage();
  if (before.data() != after.data() || before.nbytes() != after.nbytes())
    impl->set_storage_keep_dtype(on_device(after, device_tensor.device()));
  if (!device_tensor.sizes().equals(host_tensor.sizes()) || !device_tensor.strides().equals(host_tensor.strides()) ||
      device_tensor.storage_offset() != host_tensor.storage_offset())
    impl->set_sizes_and_strides(host_tensor.sizes(), host_tensor.strides(), host_tensor.storage_offset());
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  IValue* arguments = stack->data() + (stack->size() - count);
  const Call call = call_of(schema, arguments);
  ++counters.launches;
  check(call);
  if (waits(call)) wait(call.op.name.c_str());
  const Device device = device_of(call);

  HostTensors host;
  std::vector<std::pair<Tensor, Tensor>> written;   // of the device, of the host
  std::unordered_map<std::string, Tensor> aliased;  // the schema's alias sets: "a" -> the tensor of the device
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.alias_info() != nullptr && arguments[i].isTensor() && arguments[i].toTensor().defined())
      for (const auto& set : argument.alias_info()->beforeSets()) aliased[set.toUnqualString()] = arguments[i].toTensor();
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      auto twin = host.of(tensor);
      if (is_written(argument)) written.emplace_back(tensor, twin);
      return twin;
    });
    if (arguments[i].isDevice()) arguments[i] = Device(DeviceType::CPU);
    if (arguments[i].isGenerator()) arguments[i] = static_cast<DeviceGenerator*>(call.generator.unsafeGetGeneratorImpl())->next();
  }

  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);

  for (const auto& [device_tensor, host_tensor] : written) take_over(device_tensor, host_tensor);
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    auto& result = (*stack)[stack->size() - results + i];
    const auto* alias = schema.returns()[i].alias_info();
    Tensor origin;  // the argument that the result is, or is a view of
    if (alias != nullptr)
      for (const auto& set : alias->beforeSets())
        if (auto found = aliased.find(set.toUnqualString()); found != aliased.end()) origin = found->second;
    each_tensor(result, [&](const Tensor& tensor) {
      if (!origin.defined()) return on_device(tensor, device);
      if (alias->isWrite()) return origin;
      return origin.is_cuda() ? tensor_over(origin.storage(), tensor, DispatchKey::CUDA) : tensor;
    });
  }
}

// ---- Allocation, copies, storages --------------------------------------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  check_dtype(c10::dtype_or_default(dtype));
  auto& memory = memories[device_or_current(device).index()];
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  auto& memory = memories[device_or_current(device).index()];
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Between host and device a blocking copy waits, in either direction (torch's copy_kernel_cuda).
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cuda() && source.is_cuda()) {
    ++(self.device() == source.device() ? counters.launches : counters.between);
  } else {
    if (self.scalar_type() != source.scalar_type()) check_dtype(self.scalar_type());  // the device converts
    ++(self.is_cuda() ? counters.to_device : counters.to_host);
    if (!non_blocking) wait(self.is_cuda() ? "copy to the device" : "copy to the host");
  }
  HostTensors host;
  auto to = self.is_cuda() ? host.of(self) : self;
  to.copy_(source.is_cuda() ? host.of(source) : source);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto first = offset.guard_int(__FILE__, __LINE__);
  if (stride.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
    impl->set_storage_offset(first);
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes() / self.dtype().itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

bool is_pinned(const Tensor&, std::optional<Device>) { return false; }
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("is_pinned", &is_pinned);
  library.impl("record_stream", &record_stream);
}

}  // namespace pretend

namespace at {
using at::CUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---- What Python calls (`cuda.py`) -------------------------------------------------------------------------------

extern "C" {
int pretend_current_device() { return pretend::current_device; }
void pretend_set_device(int device) { pretend::current_device = c10::DeviceIndex(device); }
int pretend_device_count() { return pretend::kDevices; }
long pretend_allocated(int device) { return pretend::allocated[device]; }
long pretend_peak(int device) { return pretend::peak[device]; }
void pretend_reset_peak(int device) { pretend::peak[device] = pretend::allocated[device].load(); }
void pretend_observe_waits(void (*observer)(const char*)) { pretend::wait_observer = observer; }
long pretend_counter(int which) {
  auto& all = pretend::counters;
  std::atomic<int64_t>* each[] = {&all.launches, &all.waits, &all.to_device, &all.to_host, &all.between};
  return each[which]->load();
}
}
