#!/usr/bin/env bash
# Perform the steps of docker/cpu.Dockerfile in a chroot, where there is no Docker, and train three steps in it as its user.
# Needs root, and debootstrap, which is installed if it is not there. Takes minutes, and 3 GB below WORK.
#
#   scripts/docker_cpu.sh
#
# WORK: folder for the base system (default: a temporary one, removed at the end). It must allow devices and programs.
# MIRROR: mirror of Debian (default: the first of this machine's, if it is a Debian, else deb.debian.org).
# TORCH_INDEX: index of PyTorch's CPU builds, as in the Dockerfile.
# BIND: files and folders that are also seen in the chroot (default: this machine's configuration of pip, and the folders
#   that it names). pip there trusts the certificates that this machine trusts.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "docker_cpu.sh: needs root" >&2; exit 2; }
file=docker/cpu.Dockerfile
image=$(sed -n 's/^FROM //p' "$file")
suite=${image#debian:}
suite=${suite%-slim}
case "$image" in debian:*) ;; *) echo "docker_cpu.sh: $file is not FROM debian" >&2; exit 2 ;; esac

if [ -z "${INSIDE:-}" ]; then
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq debootstrap; }
    work=${WORK:-$(mktemp -d)}
    [ -n "${WORK:-}" ] || trap 'rm -rf --one-file-system "$work"' EXIT
    # Mounts in a namespace of their own disappear with it, so that nothing outside of $work can be removed through them.
    INSIDE=$work unshare --mount --propagation private scripts/docker_cpu.sh
    exit
fi

root=$INSIDE/root
urls=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^#' | grep -o 'https\?://[^ ]*' || true)
[ -f /etc/debian_version ] && mirror=$(printf '%s\n' "$urls" | head -n 1)
mirror=${MIRROR:-${mirror:-http://deb.debian.org/debian}}
started=$(date +%s)
[ -x "$root/bin/sh" ] || debootstrap --variant=minbase "$suite" "$root" "$mirror" > "$INSIDE/debootstrap.log" ||
    { tail -n 20 "$INSIDE/debootstrap.log" >&2; exit 1; }
echo "base system: $suite, $(($(date +%s) - started)) s, $(du -sm "$root" | cut -f1) MB"

mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
# Not in its own place, where the package ca-certificates, which is installed in the chroot, replaces it.
bundle=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
[ ! -f "$bundle" ] || { cp "$bundle" "$root/run/machine.crt" && export PIP_CERT=/run/machine.crt; }
bound=()
for path in ${BIND:-/etc/pip.conf /etc/xdg/pip $(
    # Folders of wheels and of package indexes, and constraints, that pip's configuration names.
    { python3 -m pip config list 2>/dev/null || true; } | grep -o "[ '/]/[a-zA-Z][^ ']*" | tr -d " '" | sed 's#^//#/#'
)}; do
    path=$(realpath -m "${path%/simple}") # the files of an index are next to it
    case "$path" in /etc/ssl/*) continue ;; esac
    [ -e "$path" ] || continue
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$(dirname "$root$path")" && touch "$root$path"; fi
    mount --bind "$path" "$root$path"
    bound=("$root$path" "${bound[@]}") # a folder after what is mounted in it
done

args=()
[ -z "${TORCH_INDEX:-}" ] || args+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_CERT PIP_FIND_LINKS PIP_DEFAULT_TIMEOUT; do
    args+=(--env "$name")
done
python3 scripts/dockerfile.py "$file" --root "$root" "${args[@]}" \
    --then "id && python -c 'import megapar; print(megapar.__file__)'" \
    --then "megapar launch --nproc-per-node 2 pretrain_moe.py --config configs/tiny.yaml --train-iters 3 --save /runs/first"
[ "${#bound[@]}" = 0 ] || umount "${bound[@]}" # their size is not the image's
echo "done: $(($(date +%s) - started)) s, $(du -smx "$root" | cut -f1) MB; megapar in the chroot made $(ls -m "$root/runs/first")"
