// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>

#include "lamina/transport/ucx/ucx.h"

// Joins the world of the launcher's environment, sends a message around it and leaves. For with_torch_distributed.py.
extern "C" int lamina_join_and_leave() {
  using namespace lamina;
  try {
    transport::UcxOptions options;
    options.rank = base::Rank(std::atoi(std::getenv("RANK")));
    options.size = std::atoi(std::getenv("WORLD_SIZE"));
    options.master_addr = std::getenv("MASTER_ADDR");
    options.master_port = std::atoi(std::getenv("MASTER_PORT"));
    options.join_timeout = std::chrono::seconds(60);
    const auto transport = transport::open_ucx(options);
    std::mutex mutex;
    std::condition_variable changed;
    std::string got;
    transport->start({[&](transport::Message message) {
                        std::lock_guard guard(mutex);
                        got = message.fields;
                        changed.notify_all();
                      },
                      [](base::Rank, const std::string&) {}});
    transport::Message message;
    message.kind = "probe";
    message.fields = "hello";
    transport->send(base::Rank((options.rank.value + 1) % options.size), message);
    std::unique_lock lock(mutex);
    const bool in_time = changed.wait_for(lock, std::chrono::minutes(1), [&] { return !got.empty(); });
    lock.unlock();
    transport->close(true);
    return in_time && got == "hello" ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}
