#!/usr/bin/env bash
# Prints the C++ compiler to use ($CXX, or the first of c++, g++, clang++ that works); says on stderr what to install where none works.
set -u
tried=""
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
printf '#include <atomic>\n#include <vector>\nint main() { std::vector<int> v(1); std::atomic<int> a{v[0]}; return a.load(); }\n' >"$scratch/probe.cc"

candidates=(c++ g++ clang++)
[ -z "${CXX:-}" ] || candidates=("$CXX")
for compiler in "${candidates[@]}"; do
  # $CXX may carry flags or a launcher ("ccache g++"), so it is split on purpose.
  # shellcheck disable=SC2086
  if $compiler -std=c++17 -pthread "$scratch/probe.cc" -o "$scratch/probe" >"$scratch/log" 2>&1; then
    echo "$compiler"
    exit 0
  fi
  tried="$tried $compiler"
done
{
  echo "No working C++17 compiler found (tried:$tried)."
  sed 's/^/  /' "$scratch/log" | head -n 4
  echo "Install one, for instance:  sudo apt install g++"
} >&2
exit 1
