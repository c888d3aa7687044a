// Checks a round's history with porcupine, a published checker of linearizability.
//
// The history is JSON on stdin: a list of registers. A register is a set of rows with the same history: the
// writes of micro-batches that had these rows, and how often each reader of committed rows saw them. Times are
// nanoseconds of one clock. Nobody may know whether a write took effect, as its driver was killed or was told of
// an error: then it may do so at any time after its call, or never.
//
// The specification knows nothing of transactions, markers or decisions: a row is there or not, a write puts it
// there, also a second time, and a read sees it once where it is there, and not at all where it is not.
package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

const patience = 60 * time.Second

type register struct {
	Name   string `json:"name"`
	Writes []struct {
		Call    int64 `json:"call"`
		Return  int64 `json:"return"`
		IsKnown bool  `json:"is_known"`
	} `json:"writes"`
	Reads []struct {
		Call   int64 `json:"call"`
		Return int64 `json:"return"`
		Times  int   `json:"times"`
	} `json:"reads"`
}

type asked struct {
	isWrite, isKnown bool
}

// step has the states in which a row may be after an operation.
func step(state, input, output any) []any {
	isThere, operation := state.(bool), input.(asked)
	switch {
	case operation.isWrite && operation.isKnown:
		return []any{true}
	case operation.isWrite:
		return []any{isThere, true}
	case isThere && output.(int) == 1, !isThere && output.(int) == 0:
		return []any{isThere}
	}
	return nil
}

func check(one register) porcupine.CheckResult {
	model := porcupine.NondeterministicModel{
		Init:  func() []any { return []any{false} },
		Step:  step,
		Equal: func(one, other any) bool { return one == other },
	}
	var history []porcupine.Operation
	for _, write := range one.Writes {
		end := write.Return
		if !write.IsKnown {
			end = math.MaxInt64
		}
		history = append(history, porcupine.Operation{
			ClientId: len(history), Input: asked{true, write.IsKnown}, Call: write.Call, Return: end,
		})
	}
	for _, read := range one.Reads {
		history = append(history, porcupine.Operation{
			ClientId: len(history), Input: asked{}, Call: read.Call, Output: read.Times, Return: read.Return,
		})
	}
	return porcupine.CheckOperationsTimeout(model.ToModel(), history, patience)
}

func main() {
	var registers []register
	if err := json.NewDecoder(os.Stdin).Decode(&registers); err != nil {
		fmt.Fprintln(os.Stderr, "the history cannot be read:", err)
		os.Exit(2)
	}
	wrong := 0
	for _, one := range registers {
		if result := check(one); result != porcupine.Ok {
			fmt.Printf("%s: %s\n", one.Name, result)
			wrong++
		}
	}
	if wrong > 0 {
		os.Exit(1)
	}
}
