// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/doorkeeper.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/environment/address.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

using environment::Address;
using environment::DoorPlate;
using environment::JobDoor;

// An anonymous file, the same for all ranks.
base::Fd open_plate() {
  base::Fd file(::memfd_create("lamina-door", MFD_CLOEXEC));
  if (!file) throw StartError("cannot make a file in memory: " + base::system_error());
  return file;
}

// At the address of this machine that leads to the job's others.
base::Fd listen_for(const Options& options, const Layout& layout) {
  const auto& host = options.join ? options.join->host : layout.master_address;
  const auto here = Address::local_towards(host, 1).host();
  try {
    return Address::parse(base::str(here, " ", options.join_port.value_or(0))).listen();
  } catch (const base::Error& error) {
    throw base::ConfigError(base::str(error.what(), ": give another --join-port, or none"));
  }
}

JobDoor first_of(const Options& options) {
  JobDoor first;
  if (options.join) first.launchers = {base::str(options.join->host, " ", options.join->port)};
  return first;
}

}  // namespace

Doorkeeper::Doorkeeper(const Preparation& prepared, std::string witness)
    : file_(open_plate()),
      first_(first_of(prepared.options)),
      terms_{.least = prepared.options.least.value_or(1),
             .most = prepared.options.most.value_or(0),
             .join_every = prepared.options.join_every.value_or(environment::ElasticTerms::kJoinEvery)},
      witness_(std::move(witness)) {
  begin();
  if (!prepared.options.secret_file) return;
  listener_ = listen_for(prepared.options, prepared.layout);
  address_ = Address::bound_to(listener_).text();
}

void Doorkeeper::begin() const { DoorPlate(file_.get()).write(first_); }

bool Doorkeeper::has_others() const {
  const auto launchers = DoorPlate(file_.get()).read().launchers;
  return std::ranges::any_of(launchers, [this](const auto& each) { return each != address_; });
}

void Doorkeeper::watch(Watch& watch) const {
  if (listener_) watch.add(listener_.get(), POLLIN, [this] { answer(); });
}

// Tells whoever connects.
void Doorkeeper::answer() const {
  auto door = DoorPlate(file_.get()).read();
  door.terms = terms_;
  door.witness = witness_;
  const auto text = door.text();
  while (true) {
    const base::Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    ::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
}

}  // namespace lamina::launch
