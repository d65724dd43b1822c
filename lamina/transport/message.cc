// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/message.h"

#include <ATen/ops/empty.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/copies.h"
#include "lamina/device/role.h"
#include "lamina/value/bytes.h"
#include "lamina/value/encoding.h"
#include "lamina/value/no_room.h"

namespace lamina::transport {
namespace {

constexpr std::uint32_t kMagic = 0x4c414d31;  // "LAM1"

constexpr std::size_t kBufferRow = 9;  // role of the device, and size

struct Prefix {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kFrameVersion;
  std::uint16_t zero = 0;
  Kind kind;
  std::uint32_t rest = 0;
};
static_assert(sizeof(Prefix) == 24);

static_assert(sizeof(base::CallId) == 4 * sizeof(std::int64_t), "written as it lies in memory");

std::vector<BufferSpec> get_specs(value::Reader& in) {
  std::vector<BufferSpec> specs;
  for (auto left = in.get_count(); left > 0; --left) {
    BufferSpec& spec = specs.emplace_back();
    spec.device = devices::device_of(devices::read_role(in.get<std::uint8_t>()));
    spec.size_bytes = in.get<std::int64_t>();
    if (spec.size_bytes < 0) throw base::FormatError("a buffer's row is malformed");
  }
  return specs;
}

// The bytes on the device that they are for.
at::Tensor arrived(const at::Tensor& host, const BufferSpec& spec) {
  try {
    return devices::copy_in(host);
  } catch (const c10::OutOfMemoryError& error) {
    return value::no_room(spec.size_bytes, spec.device, error);
  }
}

// A head's prefix, which is taken from it.
Prefix take_prefix(std::string_view& head) {
  Prefix prefix;
  if (head.size() < sizeof(prefix)) throw base::FormatError("a frame's prefix is cut off");
  std::memcpy(&prefix, head.data(), sizeof(prefix));
  head.remove_prefix(sizeof(prefix));
  if (prefix.magic != kMagic || prefix.version != kFrameVersion)
    throw base::FormatError("a frame's version is another");
  if (!prefix.kind.is_valid() || prefix.rest != head.size()) {
    throw base::FormatError("a frame's prefix is malformed");
  }
  return prefix;
}

}  // namespace

bool carries_tensors(const Message& message) {
  bool any = false;
  value::for_each_tensor(message.body, [&any](const at::Tensor&) { any = true; });
  return any;
}

Frame pack(const Message& message) {
  value::Encoded body = value::encode(message.body);
  const auto size_bytes = sizeof(Prefix) + kBufferRow * body.buffers.size() + sizeof(base::CallId) +
                          message.fields.size() + body.meta.size() + 3 * sizeof(std::uint64_t);
  value::Writer out(size_bytes);
  out.put(Prefix{.kind = message.kind});
  out.put<std::uint64_t>(body.buffers.size());
  for (const auto& buffer : body.buffers) {
    out.put(static_cast<std::uint8_t>(devices::role_of(buffer.device(), "a tensor on ", buffer.device())));
    out.put<std::int64_t>(buffer.numel());
  }
  out.put(message.call);
  out.put_block(message.fields);
  out.put_block(body.meta);
  Frame frame{out.take(), std::move(body.buffers)};
  const auto rest = frame.head.size() - sizeof(Prefix);
  if (rest > UINT32_MAX)
    throw base::UsageError("a message holds more than 4 GiB besides its tensors", base::Code{"step-cannot-travel"});
  const auto size = static_cast<std::uint32_t>(rest);
  std::memcpy(frame.head.data() + offsetof(Prefix, rest), &size, sizeof(size));
  return frame;
}

std::vector<BufferSpec> buffer_specs(std::string_view head) {
  take_prefix(head);
  value::Reader in(head);
  return get_specs(in);
}

Message unpack(std::string_view head, std::vector<at::Tensor> buffers) {
  const Prefix prefix = take_prefix(head);
  value::Reader in(head);
  const auto specs = get_specs(in);
  bool fits = specs.size() == buffers.size();
  for (std::size_t i = 0; fits && i < specs.size(); ++i) fits = specs[i].size_bytes == buffers[i].numel();
  if (!fits) throw base::FormatError("a frame's buffers are not those of its head");

  for (std::size_t i = 0; i < specs.size(); ++i) {
    const bool arrives = !devices::is_host(specs[i].device) && devices::is_host(buffers[i]);
    if (arrives) buffers[i] = arrived(buffers[i], specs[i]);
  }

  Message message;
  message.kind = prefix.kind;
  message.call = in.get<base::CallId>();
  message.fields = in.get_block();
  message.body = value::decode(in.get_block(), std::move(buffers));
  in.expect_end();
  return message;
}

}  // namespace lamina::transport
