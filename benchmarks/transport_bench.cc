// SPDX-License-Identifier: Apache-2.0
// Two processes send a tensor back and forth over lamina's transport. Prints for each size given (in bytes) the median
// seconds of a round trip: `transport.py` runs this in turns with c10d's Gloo. Without a size it prints how many of the
// processor's seconds it takes to sign a message and to check that, at both ends together.
#include <ATen/ops/zeros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "lamina/transport/ucx/ucx.h"
#include "lamina/transport/ucx/wire.h"

namespace {

using namespace lamina;
using Clock = std::chrono::steady_clock;

class Mailbox {
 public:
  transport::Transport::Events events() {
    return {[this](transport::Message message) {
              std::lock_guard guard(mutex_);
              messages_.push_back(std::move(message));
              changed_.notify_one();
            },
            [](base::Rank, const std::string&) {}};
  }
  transport::Message next() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::minutes(1), [&] { return !messages_.empty(); })) std::abort();
    auto message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<transport::Message> messages_;
};

void round_trip(transport::Transport& transport, Mailbox& mailbox, const at::Tensor& tensor) {
  transport::Message message;
  message.kind = "bench";
  message.fields = "bench";
  message.body = value::Value(at::Tensor(tensor));
  const base::Rank other(1 - transport.rank().value);
  if (other == base::Rank(1)) transport.send(other, message);
  mailbox.next();
  if (other == base::Rank(0)) transport.send(other, message);
}

double median_seconds(const std::function<void()>& round, std::int64_t bytes) {
  const auto rounds = std::clamp<std::int64_t>((16 << 20) / std::max<std::int64_t>(bytes, 1), 2, 500);
  std::vector<double> seconds;
  for (int turn = 0; turn < 9; ++turn) {
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < rounds; ++i) round();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(rounds));
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double processor_seconds() {
  timespec used;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

double seconds_to_sign() {
  constexpr int kMessages = 20000;
  const std::string head(300, 'x');  // a small call's
  const contact::Secret key = contact::random_secret();
  contact::Signer sender(key), receiver(key);
  transport::ucx::PieceHeader header;
  const double begin = processor_seconds();
  for (int i = 0; i < kMessages; ++i) {
    header.sequence = static_cast<std::uint64_t>(i);
    header.digest = contact::digest(head);
    header.sign(sender);
    if (!header.signed_by(receiver) || contact::digest(head) != header.digest) std::abort();
  }
  return (processor_seconds() - begin) / kMessages;
}

void run(int rank, int port, const std::vector<std::int64_t>& sizes) {
  transport::UcxOptions options;
  options.rank = base::Rank(rank);
  options.size = 2;
  options.master_addr = "127.0.0.1";
  options.master_port = port;
  const auto transport = transport::open_ucx(options);
  Mailbox mailbox;
  transport->start(mailbox.events());
  for (const std::int64_t bytes : sizes) {
    const at::Tensor tensor = at::zeros({bytes}, at::kByte);
    const double seconds = median_seconds([&] { round_trip(*transport, mailbox, tensor); }, bytes);
    if (rank == 0) std::printf("%ld %.9f\n", static_cast<long>(bytes), seconds);
  }
  transport->close(true);
}

}  // namespace

// transport_bench [PORT SIZE...]
int main(int count, char** arguments) {
  std::vector<std::int64_t> sizes;
  for (int i = 2; i < count; ++i) sizes.push_back(std::atoll(arguments[i]));
  if (sizes.empty()) return std::printf("%.9f\n", seconds_to_sign()) > 0 ? 0 : 1;
  const pid_t child = ::fork();
  run(child == 0 ? 1 : 0, std::atoi(arguments[1]), sizes);
  if (child == 0) ::_exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
