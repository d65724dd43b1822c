#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gathers in build/gpu-pack what `make gpu-check` needs and a bare machine without a network lacks: headers and static
# libraries of Debian packages that are here, and a whole UCX for CUDA 13, libraries with their modules. It has to stay
# below 60 MiB, for that is what travels.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pack=build/gpu-pack
most_mib=60
packages=(libucx-dev libssl-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libyaml-cpp-dev libdeflate-dev)
ucx=libucx-cu13==1.22.0

made=$(mktemp -d -p build)
trap 'rm -rf "$made"' EXIT
architecture=$(gcc -print-multiarch)

# A header as include/..., whichever of the system's folders has it, and what is linked.
for package in "${packages[@]}"; do
  dpkg -L "$package" >"$made/files" || stop "$package is not installed here: run make build first."
  while IFS= read -r file; do
    [[ -f $file ]] || continue
    case $file in
      /usr/include/*) to=include/${file#/usr/include/} to=${to/#include\/$architecture/include} ;;
      */libyaml-cpp.a | */libdeflate.a | */libcrypto.a) to=lib/${file##*/} ;;
      *) continue ;;
    esac
    mkdir -p "$made/pack/$(dirname "$to")"
    cp "$file" "$made/pack/$to"
  done <"$made/files"
done

# Modules find what they need of CUDA by where it lies in the package.
"$(find_python)" -m pip --disable-pip-version-check install -q --no-deps --target "$made/ucx" "$ucx" </dev/null
mkdir -p "$made/pack/libucx/lib/ucx"
cp "$made"/ucx/libucx/lib/libuc[mstp].so.0 "$made/pack/libucx/lib"
cp "$made"/ucx/libucx/lib/ucx/libuc[mt]_*.so.0 "$made/pack/libucx/lib/ucx"
cp -r "$made"/ucx/libucx_cu13.libs "$made/pack"
strip --strip-debug "$made"/pack/libucx/lib/*.so.0 "$made"/pack/libucx/lib/ucx/*.so.0
chmod -R go-w "$made/pack"

mib=$(du -sm --apparent-size "$made/pack" | cut -f 1)
((mib < most_mib)) || stop "the pack has $mib MiB, and fewer than $most_mib travel."
rm -rf "$pack"
mv "$made/pack" "$pack"
say "$pack has $mib MiB: take it along to where make gpu-check runs"
