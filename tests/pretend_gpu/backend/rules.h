// What a real CUDA device refuses, and where it makes the program wait; on request, what Apple's refuse.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "devices.h"

namespace pretend {

using Names = std::unordered_set<std::string>;
#include "operators.inc"  // kKnown, kOnCuda, kUnchecked: from torch's own list of operators, by `operators.py`

struct TensorArgument {
  at::Tensor tensor;
  const std::string* name;
  bool written;
};

struct Operator;  // below

struct Call {
  const Operator& op;
  std::vector<TensorArgument> tensors;
  std::optional<Device> requested;   // an argument `device`
  at::Generator generator;
};

// Copies are how tensors of several devices meet.
inline const Names kAnyDevices = {
    "copy_", "_to_copy", "_copy_from", "set_.source_Tensor", "is_set_to", "resize_as_", "_pin_memory", "is_pinned", "_has_compatible_shallow_copy_type"};
inline const Names kIndexing = {"index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"};
inline const Names kIndexedAssignment = {"_index_put_impl_", "index_put_", "_unsafe_index_put"};
inline const Names kMatrixProducts = {
    "mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_", "mv", "addmv", "addmv.out", "dot", "vdot", "addbmm", "_addmm_activation"};
// The size of their result, or whether they succeeded, is known only when the device has computed it.
inline const Names kWaiting = {
    "_local_scalar_dense", "equal", "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "repeat_interleave.Tensor", "bincount", "linalg_cholesky_ex.L", "_linalg_solve_ex.result",
    "linalg_inv_ex.inverse"};

// What the sets say of one operator: looked up when it is called first, and not a dozen names at every call.
struct Operator {
  std::string name;  // without "aten::", with the overload: "add.Tensor"
  bool refused, any_devices, indexing, assignment, takes_numbers, product, waiting;

  explicit Operator(const c10::FunctionSchema& schema) : name(schema.name()) {
    const bool aten = name.rfind("aten::", 0) == 0;  // one of torch's own
    if (aten) name = name.substr(6);
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
    refused = aten && kKnown.count(name) && !kOnCuda.count(name);
    any_devices = kAnyDevices.count(name) > 0;
    indexing = kIndexing.count(name) > 0;
    assignment = kIndexedAssignment.count(name) > 0;
    // Operators over torch's TensorIterator take a number that is a tensor of the CPU; the others take none.
    takes_numbers = kUnchecked.count(name) > 0 || name.rfind("_foreach", 0) == 0 || name.rfind("_fused_", 0) == 0;
    product = kMatrixProducts.count(name) > 0;
    waiting = kWaiting.count(name) > 0;
  }
};

inline const Operator& operator_of(const c10::FunctionSchema& schema) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Operator> known;
  return known.try_emplace(&schema, schema).first->second;
}

// Apple's GPUs ("mps") have no float64. Read once, when the process starts.
inline const bool kNoFloat64 = [] {
  const char* given = std::getenv("PRETEND_GPU_NO_FLOAT64");
  return given != nullptr && std::string(given) == "1";
}();

// Called wherever a tensor of the device comes into being.
inline void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(!kNoFloat64 || (dtype != at::kDouble && dtype != at::kComplexDouble), "Cannot convert a pretended Tensor to ", dtype,
                   " dtype: the device has no float64 (PRETEND_GPU_NO_FLOAT64=1)");
}

inline bool is_index_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

inline void check_indices(const Call& call, const at::Tensor& self, size_t end) {
  for (size_t i = 1; i < end; ++i) {
    const auto& one = call.tensors[i];
    if (one.written) continue;
    TORCH_CHECK(one.tensor.device() == self.device() || one.tensor.is_cpu(),
                "indices should be either on cpu or on the same device as the indexed tensor (", self.device(), ")");
  }
}

inline void check_devices(const Call& call) {
  if (call.op.any_devices) return;
  if (call.op.indexing) return check_indices(call, call.tensors.front().tensor, call.tensors.size());
  if (call.op.assignment) {
    const auto& self = call.tensors.front().tensor;
    const auto& value = call.tensors.back().tensor;
    TORCH_CHECK(!self.is_cpu(), "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    TORCH_CHECK(value.device() == self.device() || value.numel() == 1,
                "expected tensors to be on the same device: index_put_ on ", self.device(), " with values on ", value.device());
    return check_indices(call, self, call.tensors.size() - 1);
  }
  std::optional<Device> common = call.requested;
  for (const auto& one : call.tensors) {
    if (call.op.takes_numbers && one.tensor.is_cpu() && one.tensor.dim() == 0 && !one.written) continue;
    if (!common) common = one.tensor.device();
    TORCH_CHECK(*common == one.tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *common, " and ", one.tensor.device(), "! (when checking argument ", *one.name, " of aten::", call.op.name, ")");
  }
}

inline void check(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(!call.op.refused, "Could not run 'aten::", call.op.name, "' with arguments from the 'CUDA' backend.");
  check_devices(call);
  TORCH_CHECK(!call.generator.defined() || call.generator.device().is_cuda(),
              "Expected a 'cuda' device type for generator but found '", call.generator.defined() ? call.generator.device().type() : DeviceType::CPU, "'");
  if (call.op.product)
    for (const auto& one : call.tensors)
      TORCH_CHECK(!at::isIntegralType(one.tensor.scalar_type(), true), "\"addmm_cuda\" not implemented for '", one.tensor.scalar_type(), "'");
}

// Whether the program would wait for the device here.
inline bool waits(const Call& call) {
  if (call.op.waiting) return true;
  if (!call.op.indexing && !call.op.assignment) return false;
  // A boolean index becomes positions, for which index.Tensor_out has called nonzero already; an index on the CPU is
  // copied to the device.
  const bool masks_count = call.op.name != "index.Tensor_out";
  const size_t end = call.tensors.size() - (call.op.assignment ? 1 : 0);
  for (size_t i = 1; i < end; ++i)
    if (!call.tensors[i].written && ((masks_count && is_index_mask(call.tensors[i].tensor)) || call.tensors[i].tensor.is_cpu())) return true;
  return false;
}

}  // namespace pretend
