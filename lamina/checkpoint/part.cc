// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/part.h"

#include <algorithm>

#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/value/dtype.h"

namespace lamina::checkpoint {

layout::DType savable_dtype(const at::Tensor& tensor, const std::string& name) {
  const auto refuse = [&](const char* what) {
    throw base::UsageError(
        base::str(name, " is ", what,
                  ", which has no place in a checkpoint: leave it out, or save it with lamina.save()"),
        base::Code{"checkpoint-cannot-save"});
  };
  if (tensor.layout() != at::kStrided) refuse("sparse");
  if (tensor.is_quantized()) refuse("quantised");
  if (tensor.is_meta()) refuse("without values (meta)");
  const auto dtype = value::dtype_of(tensor.scalar_type());
  if (!dtype || archive::safetensors_name(*dtype).empty()) refuse("of a dtype that safetensors files do not have");
  return *dtype;
}

at::Tensor memory_of(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

Part whole_part(std::string name, archive::Kind kind, const at::Tensor& tensor) {
  Part part;
  part.tensor.dtype = savable_dtype(tensor, name);
  part.tensor.name = std::move(name);
  part.tensor.kind = kind;
  part.tensor.shape = tensor.sizes().vec();
  part.region = layout::whole(part.tensor.shape);
  part.elements = memory_of(tensor);
  return part;
}

std::int64_t size_bytes(const Part& part) { return count(part.region) * traits(part.tensor.dtype).size_bytes; }

layout::Region within(layout::Region region, std::int64_t begin, std::int64_t end) {
  const auto first = region.begin;
  region.begin = std::min(first + begin, region.end);
  region.end = std::min(first + end, region.end);
  region.size = region.end - region.begin;
  return region;
}

at::ScalarType scalar_type(layout::DType dtype) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (value::dtype_of(type) == dtype) return type;
  }
  throw base::InternalError("a dtype that torch does not have");
}

}  // namespace lamina::checkpoint
