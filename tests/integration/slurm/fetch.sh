#!/bin/sh
# Debian's Slurm, unpacked into the folder $1 and installed nowhere.
set -eu
root=$1
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
chmod 755 "$packages"
(cd "$packages" && apt-get -qq download \
  slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15)
rm -rf "$root.new"
for package in "$packages"/*.deb; do dpkg-deb -x "$package" "$root.new"; done
# What Debian's alternatives would do.
for program in slurmctld slurmd slurmstepd; do
  ln -s "$program-wlm" "$root.new/usr/sbin/$program"
done
rm -rf "$root"
mv "$root.new" "$root"
